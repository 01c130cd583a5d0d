"""Bits by measured sensitivity: the prediction against what rounding one matrix alone does to the model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from family_models import bfloat16, config_of, tiny, write_hf

from lmdeploy.errors import ConfigError
from lmdeploy.lite.mixed import Measured, Schemes, measure, mixed_schemes
from lmdeploy.lite.recipe import Recipe
from lmdeploy.lite.rounding import full_grid
from lmdeploy.models.checkpoint import Checkpoint
from lmdeploy.models.reference import Reference
from lmdeploy.models.registry import open_checkpoint
from lmdeploy.quant.scheme import WeightScheme
from lmdeploy.quant.tensors import Tensor

BASE = WeightScheme(4, 32)
EIGHT = WeightScheme(8, 32)
WINDOWS = [np.random.default_rng(i).integers(3, 130, 64).tolist() for i in range(8)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    model = tiny("Qwen2")
    path = write_hf(tmp_path_factory.mktemp("mixed") / "model", config_of(model), bfloat16(model))
    return open_checkpoint(path)


def quiet(step: str, done: int, work: int) -> None:
    assert 0 <= done < work and "layer" in step


def matrices(checkpoint: Checkpoint) -> list[str]:
    return [x.name for i in range(len(checkpoint.spec.layers)) for x in checkpoint.spec.linears(i)]


class Rounded:
    """The checkpoint with one matrix rounded."""

    def __init__(self, checkpoint: Checkpoint, name: str, scheme: WeightScheme) -> None:
        self._checkpoint, self._name, self._scheme = checkpoint, f"{name}.weight", scheme
        self.spec, self.names = checkpoint.spec, checkpoint.names

    def read(self, name: str) -> Tensor:
        tensor = self._checkpoint.read(name)
        if name != self._name:
            return tensor
        weight = torch.from_numpy(np.asarray(tensor, np.float32))
        grid = full_grid(weight, self._scheme)
        return grid.values(grid.codes(weight)).numpy()


def divergence(model: Reference, other: Reference) -> float:
    total = 0.0
    for ids in WINDOWS:
        p, q = (torch.from_numpy(m.logits(ids)).double().log_softmax(-1) for m in (model, other))
        total += float((p.exp() * (p - q)).sum(-1).mean()) / len(WINDOWS)
    return total


@pytest.fixture(scope="module")
def measured(checkpoint: Checkpoint) -> Measured:
    return measure(checkpoint, WINDOWS, {n: [BASE, EIGHT, None] for n in matrices(checkpoint)}, quiet)


def test_predicted_divergence_is_that_of_rounding_one_matrix(
    checkpoint: Checkpoint, measured: Measured
) -> None:
    model = Reference(checkpoint)
    names = matrices(checkpoint)[::2]
    true = np.array([divergence(model, Reference(Rounded(checkpoint, n, BASE))) for n in names])  # type: ignore[arg-type]
    guess = np.array([measured.divergence[n][BASE] for n in names])
    ratios = np.log(guess / true)
    assert np.median(np.abs(ratios)) < 0.15 and np.abs(ratios).max() < np.log(4)
    assert np.corrcoef(np.log(guess), np.log(true))[0, 1] > 0.9
    for name in names:
        assert measured.divergence[name][None] == 0
        assert measured.divergence[name][EIGHT] < 0.02 * measured.divergence[name][BASE]


def test_bits_stay_within_the_target_and_go_where_they_save_most(
    checkpoint: Checkpoint, measured: Measured
) -> None:
    schemes: Schemes = dict.fromkeys(matrices(checkpoint), BASE)

    def holds(name: str, scheme: WeightScheme) -> bool:
        return scheme.group_size == 32

    recipe = Recipe(scheme=BASE, target_bpw=5.0)
    chosen, line = mixed_schemes(checkpoint, WINDOWS, recipe, schemes, holds, quiet)
    assert set(chosen.values()) <= {BASE, EIGHT, None} and "8 bits" in line
    total = sum(measured.weights.values())
    used = sum(measured.bits[name][scheme] for name, scheme in chosen.items())
    assert 4.9 * total < used <= 5.0 * total
    saved = {n: (d[BASE] - d[EIGHT]) / measured.weights[n] for n, d in measured.divergence.items()}
    more = [saved[name] for name, scheme in chosen.items() if scheme != BASE]
    less = [saved[name] for name, scheme in chosen.items() if scheme == BASE]
    assert np.median(more) > np.median(less)
    with pytest.raises(ConfigError, match=r"need 4\.7"):
        mixed_schemes(checkpoint, WINDOWS, Recipe(scheme=BASE, target_bpw=4.0), schemes, holds, quiet)
    with pytest.raises(ConfigError, match="calibration"):
        mixed_schemes(checkpoint, [], recipe, schemes, holds, quiet)


@pytest.mark.parametrize(("bits", "expected"), [(8, EIGHT), (16, None)])
def test_most_sensitive_layers_are_kept(
    checkpoint: Checkpoint, measured: Measured, bits: int, expected: WeightScheme | None
) -> None:
    schemes: Schemes = dict.fromkeys(matrices(checkpoint), BASE)
    recipe = Recipe(scheme=BASE, keep=2, keep_bits=bits)  # type: ignore[arg-type]
    chosen, _ = mixed_schemes(checkpoint, WINDOWS, recipe, schemes, lambda n, s: True, quiet)
    kept = {name.split(".")[1] for name, scheme in chosen.items() if scheme == expected}
    by_layer = {
        layer: sum(d[BASE] for n, d in measured.divergence.items() if n.split(".")[1] == layer)
        for layer in "0123"
    }
    assert kept == set(sorted(by_layer, key=lambda layer: -by_layer[layer])[:2])
    assert sum(scheme == expected for scheme in chosen.values()) == 14
