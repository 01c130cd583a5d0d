"""The scale search on layers with outlier channels, against a brute-force search of the same error."""

from __future__ import annotations

import pytest
import torch

from lmdeploy.lite import awq
from lmdeploy.lite.problem import InputStats, LayerProblem
from lmdeploy.lite.rounding import full_grid
from lmdeploy.lite.smoothing import SmoothingGroup, Weights, fold, smoothing_groups
from lmdeploy.models.spec import AttentionSpec, FfnSpec, LayerSpec, ModelSpec, NormSpec
from lmdeploy.quant.scheme import WeightScheme

HIDDEN, HEADS, KV, DIM, WIDE = 128, 8, 2, 16, 256
SPEC = ModelSpec(
    "none",
    HIDDEN,
    100,
    512,
    NormSpec(1e-6),
    (LayerSpec(AttentionSpec(HEADS, KV, DIM, DIM**-0.5, None), FfnSpec(WIDE)),),
)
SCHEME = WeightScheme(4, 32, False)


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def inside_attention(weights: Weights, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs of q, k, v; inputs of o) for float32 [sequences, tokens, hidden]."""
    h = normed(x, weights["attn_norm.weight"])
    q, k, v = (
        (h @ weights[f"attn.{p}_proj.weight"].T).unflatten(-1, (-1, DIM)).transpose(1, 2) for p in "qkv"
    )
    mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return h, mixed.transpose(1, 2).flatten(-2)


def inside_ffn(weights: Weights, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs of gate, up; inputs of down)."""
    h = normed(x, weights["ffn_norm.weight"])
    gate, up = (h @ weights[f"ffn.{p}_proj.weight"].T for p in ("gate", "up"))
    return h, torch.nn.functional.silu(gate) * up


def attention(weights: Weights, x: torch.Tensor) -> torch.Tensor:
    return inside_attention(weights, x)[1] @ weights["attn.o_proj.weight"].T


def ffn(weights: Weights, x: torch.Tensor) -> torch.Tensor:
    return inside_ffn(weights, x)[1] @ weights["ffn.down_proj.weight"].T


def stats(inputs: torch.Tensor) -> InputStats:
    x = inputs.flatten(0, 1)
    return InputStats(len(x), x.abs().mean(0), x.abs().amax(0), x.T @ x / len(x))


def layer(seed: int, outliers: float) -> LayerProblem:
    """Some outputs of every norm and of v and up are `outliers` times larger than the rest."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    weights = {
        f"{linear.name.removeprefix('layers.0.')}.weight": random(linear.out_features, linear.in_features)
        * linear.in_features**-0.5
        for linear in SPEC.linears(0)
    }
    weights |= {"attn_norm.weight": 1 + 0.1 * random(HIDDEN), "ffn_norm.weight": 1 + 0.1 * random(HIDDEN)}
    for group, channels in zip(smoothing_groups(SPEC, 0), ([3, 40], [5], [7], [9, 70]), strict=True):
        factors = torch.ones(len(weights[f"{group.source}.weight"]))
        factors[channels] = outliers**-0.5  # what reads the outliers is smaller, as in trained models
        weights |= fold(weights, group, factors)
        weights[f"{group.source}.weight"][channels] *= outliers**0.5
    x = random(4, 64, HIDDEN)
    h, mixed = inside_attention(weights, x)
    h2, wide = inside_ffn(weights, x + mixed @ weights["attn.o_proj.weight"].T)
    by_name = {f"attn.{p}_proj": stats(h) for p in "qkv"} | {"attn.o_proj": stats(mixed)}
    by_name |= {"ffn.gate_proj": stats(h2), "ffn.up_proj": stats(h2), "ffn.down_proj": stats(wide)}
    return LayerProblem(SPEC, 0, weights, by_name, dict.fromkeys(by_name, SCHEME), x, attention, ffn)


def rounded(name: str, weight: torch.Tensor) -> torch.Tensor:
    grid = full_grid(weight, SCHEME)
    return grid.values(grid.codes(weight))


class BlockError:
    """Of rounding a group's matrices, by the true output of attention or ffn on the sample."""

    def __init__(self, problem: LayerProblem, group: SmoothingGroup) -> None:
        self.weights, self.group = dict(problem.weights), group
        self.compute, self.x = attention, problem.sample
        if group.block == "ffn":
            self.compute, self.x = ffn, problem.sample + attention(self.weights, problem.sample)
        self.wanted = self.compute(self.weights, self.x)

    def __call__(self, scales: torch.Tensor) -> float:
        changed = self.weights | fold(self.weights, self.group, scales)
        for name in self.group.linears:
            grid = full_grid(changed[f"{name}.weight"], SCHEME)
            changed[f"{name}.weight"] = grid.values(grid.codes(changed[f"{name}.weight"]))
        return float((self.compute(changed, self.x) - self.wanted).pow(2).mean())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("outliers", [8.0, 30.0])
def test_scales_come_close_to_brute_force(seed: int, outliers: float) -> None:
    """Brute force: every ratio in steps of 1/64."""
    problem = layer(seed, outliers)
    for group in smoothing_groups(SPEC, 0):
        error = BlockError(problem, group)
        found = error(awq.searched(problem, error.weights, problem.stats, group, rounded))
        stats = problem.stats[group.linears[0]]
        tried = [error(awq.candidate(stats, group, ratio / 64)) for ratio in range(65)]
        assert found <= 1.05 * min(tried), group.source
        assert found <= tried[0] * (1 + 1e-6)
