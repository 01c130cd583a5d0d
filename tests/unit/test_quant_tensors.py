"""Grouped tensors against their definition in float64."""

from __future__ import annotations

import numpy as np
import pytest

from lmdeploy.quant.tensors import GroupedTensor

N, K = 6, 128


def make(form: str, group: int, scale_type: type[np.floating]) -> GroupedTensor:
    rng = np.random.default_rng(group)
    scales = rng.uniform(0.001, 0.1, (N, K // group)).astype(scale_type)
    if form == "eight bit":
        return GroupedTensor(8, group, rng.integers(-128, 128, (N, K)).astype(np.int8), scales)
    codes = rng.integers(0, 16, (N, K)).astype(np.uint8)
    if form == "zero":
        return GroupedTensor(
            4, group, codes, scales, zeros=rng.integers(0, 16, scales.shape).astype(np.uint8)
        )
    return GroupedTensor(4, group, codes, scales, mins=rng.normal(0, 1, scales.shape).astype(scale_type))


@pytest.mark.parametrize("form", ["zero", "minimum", "eight bit"])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("scale_type", [np.float16, np.float32])
def test_values_by_definition(form: str, group: int, scale_type: type[np.floating]) -> None:
    tensor = make(form, group, scale_type)
    values = tensor.dequantize()
    assert (tensor.shape, values.shape, values.dtype) == ((N, K), (N, K), np.float32)
    for row in range(N):
        for column in range(0, K, 7):
            g = column // group
            code, scale = float(tensor.codes[row, column]), float(tensor.scales[row, g])
            if tensor.zeros is not None:
                expected = (code - float(tensor.zeros[row, g])) * scale
            else:
                expected = code * scale + (0.0 if tensor.mins is None else float(tensor.mins[row, g]))
            # One rounding of the product and one of the sum, whose terms are at most 5 in size.
            assert values[row, column] == pytest.approx(expected, rel=2**-23, abs=5 * 2**-23)


@pytest.mark.parametrize("form", ["zero", "minimum", "eight bit"])
@pytest.mark.parametrize("index", [np.array([5, 0, 0, 3]), slice(1, 5), slice(None, None, -1)])
def test_rows_are_whole_output_channels(form: str, index: np.ndarray | slice) -> None:
    tensor = make(form, 32, np.float16)
    assert np.array_equal(tensor.rows(index).dequantize(), tensor.dequantize()[index])
