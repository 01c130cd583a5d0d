"""Whole layers of some families through every method: of the right form, better than plain rounding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from family_models import bfloat16, config_of, tiny, write_hf
from lite_layers import Collected, as_weights

from lmdeploy.lite.methods import FEWEST_TOKENS, quantiser
from lmdeploy.lite.problem import LayerProblem, LayerResult
from lmdeploy.lite.recipe import Method, Recipe
from lmdeploy.lite.walk import Walk
from lmdeploy.models.registry import open_checkpoint
from lmdeploy.quant.scheme import WHOLE_ROW, WeightScheme
from lmdeploy.quant.tensors import GroupedTensor

SCHEME = WeightScheme(4, 32)
FAMILIES = ["Llama", "Qwen2", "Qwen3", "Gemma2", "Olmo2"]


def problems(name: str, folder: Path, scheme: WeightScheme = SCHEME) -> list[LayerProblem]:
    """Of all layers, with the statistics that the walk gathers."""
    model = tiny(name)
    checkpoint = open_checkpoint(write_hf(folder / "model", config_of(model), bfloat16(model)))
    rng = np.random.default_rng(0)
    windows = [rng.integers(3, 130, 32).tolist() for _ in range(6)]
    collected = Collected()
    schemes = {x.name: scheme for i in range(len(checkpoint.spec.layers)) for x in checkpoint.spec.linears(i)}
    Walk(checkpoint, windows, folder, lambda *_: None).run(collected.quantise, schemes, collected)
    return collected.problems


def block_error(problem: LayerProblem, result: LayerResult) -> float:
    """Mean square of what changes in the layer's output on the sample."""
    x, scale = problem.sample, problem.spec.layers[problem.index].residual_scale

    def output(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        middle = x + scale * problem.attention(weights, x)
        return middle + scale * problem.ffn(weights, middle)

    before = dict(problem.weights)
    return float((output(before | as_weights(result)) - output(before)).pow(2).mean())


@pytest.mark.parametrize("name", FAMILIES)
def test_each_method_beats_plain_rounding(name: str, tmp_path: Path) -> None:
    methods: list[Method] = ["rtn", "awq", "gptq", "awq+gptq"]
    totals = dict.fromkeys(methods, 0.0)
    for problem in problems(name, tmp_path):
        for method in methods:
            result = quantiser(Recipe(method, SCHEME, clip=method != "rtn"))(problem)
            totals[method] += block_error(problem, result)
            assert {f"{n}.weight" for n in problem.schemes} <= set(result.tensors)
            for report in result.linears:
                assert 0 < report.error < 0.1 and report.bits_per_weight > 4
    assert totals["awq"] < totals["rtn"] and totals["gptq"] < totals["rtn"]
    assert totals["awq+gptq"] < 0.7 * totals["rtn"]


def test_twice_the_same(tmp_path: Path) -> None:
    problem = problems("Llama", tmp_path)[0]
    first, second = (as_weights(quantiser(Recipe("awq+gptq", SCHEME))(problem)) for _ in range(2))
    assert all(values.equal(second[name]) for name, values in first.items())


def test_matrices_that_saw_few_tokens_are_rounded_plainly(tmp_path: Path) -> None:
    """K38: as an expert that no text chose; the others are treated as ever."""
    problem = problems("Llama", tmp_path)[0]
    few = replace(problem.stats["ffn.down_proj"], tokens=FEWEST_TOKENS - 1)
    stats = {n: s for n, s in problem.stats.items() if n != "ffn.up_proj"} | {"ffn.down_proj": few}
    result = quantiser(Recipe("awq+gptq", SCHEME))(replace(problem, stats=stats))
    plain = quantiser(Recipe("rtn", SCHEME, clip=False))(problem)
    down, expected = result.tensors["ffn.down_proj.weight"], plain.tensors["ffn.down_proj.weight"]
    assert isinstance(down, GroupedTensor) and isinstance(expected, GroupedTensor)
    assert (down.codes == expected.codes).all()
    notes = {report.name: report.note for report in result.linears}
    assert notes["ffn.down_proj"].startswith(f"{FEWEST_TOKENS - 1} tokens")
    assert notes["ffn.up_proj"].startswith("0 tokens") and notes["attn.q_proj"] == ""
    assert all(np.isfinite(w.numpy()).all() for w in as_weights(result).values())


def test_without_any_tokens_everything_is_rounded_plainly(tmp_path: Path) -> None:
    problem = replace(problems("Llama", tmp_path)[0], stats={}, sample=torch.zeros(0, 0, 72))
    result = quantiser(Recipe("awq+gptq", SCHEME))(problem)
    plain = quantiser(Recipe("rtn", SCHEME, clip=False))(problem)
    for name, tensor in plain.tensors.items():
        other = result.tensors[name]
        assert isinstance(tensor, GroupedTensor) and isinstance(other, GroupedTensor)
        assert (tensor.codes == other.codes).all() and (tensor.scales == other.scales).all()


def test_matrices_that_are_kept_have_no_part_in_the_search(tmp_path: Path) -> None:
    problem = problems("Llama", tmp_path)[1]
    schemes = {n: None if n.startswith("ffn") else SCHEME for n in problem.schemes}
    result = quantiser(Recipe("awq+gptq", SCHEME))(replace(problem, schemes=schemes))
    assert not any(name.startswith("ffn") for name in result.tensors)
    assert len(result.linears) == 4


@pytest.mark.parametrize("search", [False, True])
def test_smooth_quant_changes_only_what_it_must(search: bool, tmp_path: Path) -> None:
    scheme = WeightScheme(8, WHOLE_ROW, True)
    for problem in problems("Qwen2", tmp_path, scheme):
        result = quantiser(Recipe("smooth_quant", scheme, search_scale=search, clip=False))(problem)
        q = result.tensors["attn.q_proj.weight"]
        assert isinstance(q, GroupedTensor) and q.codes.dtype == np.int8 and q.scales.shape == (96, 1)
        norm = np.asarray(result.tensors["attn_norm.weight"])
        assert not np.allclose(norm, problem.weights["attn_norm.weight"].numpy())
        assert all(report.error < 1e-3 for report in result.linears)
