"""The scale search on layers with outlier channels, against a brute-force search of the same error."""

from __future__ import annotations

import pytest
import torch

from lmdeploy.lite import awq
from lmdeploy.lite.problem import InputStats, LayerProblem
from lmdeploy.lite.rounding import full_grid
from lmdeploy.lite.smoothing import Weights, fold, smoothing_groups
from lmdeploy.models.spec import AttentionSpec, FfnSpec, LayerSpec, ModelSpec, NormSpec
from lmdeploy.quant.scheme import WeightScheme

HIDDEN, HEADS, KV, DIM, WIDE = 64, 8, 2, 8, 96
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
    """Some channels of every norm and of v and up are `outliers` times larger than the rest."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    weights = {
        f"{linear.name.removeprefix('layers.0.')}.weight": random(linear.out_features, linear.in_features)
        * linear.in_features**-0.5
        for linear in SPEC.linears(0)
    }
    weights |= {"attn_norm.weight": 1 + 0.1 * random(HIDDEN), "ffn_norm.weight": 1 + 0.1 * random(HIDDEN)}
    for name, channels in {
        "attn_norm": [3, 40],
        "ffn_norm": [7],
        "attn.v_proj": [5],
        "ffn.up_proj": [9, 70],
    }.items():
        weights[f"{name}.weight"][channels] *= outliers
    x = random(4, 64, HIDDEN)
    h, mixed = inside_attention(weights, x)
    h2, wide = inside_ffn(weights, x + mixed @ weights["attn.o_proj.weight"].T)
    by_name = {f"attn.{p}_proj": stats(h) for p in "qkv"} | {"attn.o_proj": stats(mixed)}
    by_name |= {"ffn.gate_proj": stats(h2), "ffn.up_proj": stats(h2), "ffn.down_proj": stats(wide)}
    return LayerProblem(SPEC, 0, weights, by_name, dict.fromkeys(by_name, SCHEME), x, attention, ffn)


def rounded(name: str, weight: torch.Tensor, seen: InputStats) -> torch.Tensor:
    grid = full_grid(weight, SCHEME)
    return grid.values(grid.codes(weight))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("outliers", [8.0, 30.0])
def test_scales_come_close_to_brute_force(seed: int, outliers: float) -> None:
    """Brute force: every ratio in steps of 1 %, by the true output of attention or ffn."""
    problem = layer(seed, outliers)
    weights = dict(problem.weights)
    middle = problem.sample + attention(weights, problem.sample)
    for group in smoothing_groups(SPEC, 0):
        compute, x = (attention, problem.sample) if group.block == "attention" else (ffn, middle)
        wanted = compute(weights, x)

        def error(scales: torch.Tensor) -> float:
            changed = weights | fold(weights, group, scales)
            for name in group.linears:
                changed[f"{name}.weight"] = rounded(name, changed[f"{name}.weight"], problem.stats[name])
            return float((compute(changed, x) - wanted).pow(2).mean())

        found = error(awq.searched(problem, weights, problem.stats, group, rounded))
        best = min(
            error(awq.candidate(problem.stats[group.linears[0]], group, ratio / 100)) for ratio in range(100)
        )
        assert found <= 1.05 * best, group.source
        assert found <= error(torch.ones_like(awq.fixed(weights, problem.stats, group)))
