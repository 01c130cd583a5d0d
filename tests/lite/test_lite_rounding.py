"""Rounding against its definition in float64, with groups that end short and groups that are degenerate."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lmdeploy.lite.rounding import full_grid
from lmdeploy.quant.scheme import WHOLE_ROW, WeightScheme

SCHEMES = [
    WeightScheme(bits, group, symmetric)
    for bits in (4, 8)
    for group in (32, 64, 128, WHOLE_ROW)
    for symmetric in (False, True)
]


def weights(rows: int = 5, inputs: int = 168) -> torch.Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1)) * 0.1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_value_is_the_nearest_that_its_group_has(scheme: WeightScheme) -> None:
    weight = weights()
    grid = full_grid(weight, scheme)
    tensor = grid.tensor(grid.codes(weight))
    values = tensor.dequantize()
    group = 168 if scheme.group_size == WHOLE_ROW else scheme.group_size
    assert tensor.scales.shape == (5, -(-168 // group)) == (5, scheme.groups(168))
    assert tensor.scales.dtype == np.float16
    signed = scheme.bits == 8 and scheme.symmetric
    codes = np.arange(-127, 128) if signed else np.arange(1 << scheme.bits)
    for row in range(5):
        for k in range(168):
            scale = float(tensor.scales[row, k // group])
            zero = 0 if tensor.zeros is None else int(tensor.zeros[row, k // group])
            off = abs((codes - zero) * scale - float(weight[row, k]))
            assert abs(values[row, k] - float(weight[row, k])) <= off.min() + 1e-7
            if not scheme.symmetric:
                assert off.min() <= scale * 1.001  # a rounded zero point moves an end by half a step


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("value", [0.0, 0.3, -0.3, 1e-9, -1e-30, 1e9, -1e30])
def test_groups_of_one_value(scheme: WeightScheme, value: float) -> None:
    weight = weights()
    weight[1] = value
    grid = full_grid(weight, scheme)
    tensor = grid.tensor(grid.codes(weight))
    values = tensor.dequantize()
    assert np.isfinite(values).all() and np.isfinite(tensor.scales).all() and (tensor.scales > 0).all()
    if abs(value) in (0.0, 0.3):
        assert np.abs(values[1] - value).max() <= abs(value) * (0.07 if scheme.symmetric else 0.001)
    if abs(value) < 1e-8:
        assert np.abs(values[1]).max() <= 1e-6
    if abs(value) > 1e8:  # beyond what float16 scales reach: the largest there is
        assert np.sign(values[1]).tolist() == [np.sign(value)] * 168 and np.abs(values[1]).min() > 4e5


def test_zero_points_are_codes() -> None:
    """Also where all values of a group are far from zero (AWQ files hold 0 to 15)."""
    weight = weights().abs() + 1.0
    weight[0] *= -1
    grid = full_grid(weight, WeightScheme())
    assert grid.zeros.unique().tolist() == [0.0, 15.0]
    assert (grid.values(grid.codes(weight)) - weight).abs().max() < 0.06
