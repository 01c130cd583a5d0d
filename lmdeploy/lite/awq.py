"""Activation-aware scales (AWQ, Lin et al. 2023, arXiv 2306.00978): input channels that matter are made
larger before rounding and smaller again by the tensor before.

A candidate is mean|x|^ratio; the one of least output error is taken. The error is that of rounding every
matrix of the smoothing group, first from gram matrices (cheap: no tokens), then, for the best few, of the
block's output on the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from lmdeploy.lite.problem import InputStats, LayerProblem
from lmdeploy.lite.smoothing import SmoothingGroup, Weights, fold, fold_stats, storable

FIXED_RATIO = 0.5
_RATIOS = tuple(step / 20 for step in range(20))
_FINALISTS = 3

Round = Callable[[str, torch.Tensor, InputStats], torch.Tensor]
"""(name, weight, stats of its inputs) -> the values it is rounded to."""


def candidate(stats: InputStats, group: SmoothingGroup, ratio: float) -> torch.Tensor:
    """Scales by channel of the group's source, geometric mean of the extremes 1; channels that never occur
    keep the smallest."""
    strength = group.to_channels(stats.mean_abs).clamp(min=1e-6)
    scales = strength.pow(ratio).clamp(min=1e-4)
    return scales / (scales.max() * scales.min()).sqrt()


def output_error(weight: torch.Tensor, values: torch.Tensor, gram: torch.Tensor) -> float:
    """Mean over tokens of |(weight - values) x|^2."""
    off = values - weight
    return float(((off @ gram) * off).sum())


def group_error(
    weights: Mapping[str, torch.Tensor],
    stats: Mapping[str, InputStats],
    group: SmoothingGroup,
    scales: torch.Tensor,
    rounded: Round,
) -> float:
    """Sum of the output errors of the group's matrices, each after division by what it puts out."""
    inputs, total = group.to_inputs(scales), 0.0
    for name in group.linears:
        weight, seen = weights[f"{name}.weight"] * inputs, fold_stats(stats[name], inputs)
        total += output_error(weight, rounded(name, weight, seen), seen.gram)
    return total


def searched(
    problem: LayerProblem,
    weights: Weights,
    stats: Mapping[str, InputStats],
    group: SmoothingGroup,
    rounded: Round,
) -> torch.Tensor:
    """Scales [channels] of least output error when `weights` (some groups folded already) are rounded."""
    tries = [storable(weights, group, candidate(stats[group.linears[0]], group, r)) for r in _RATIOS]
    errors = [group_error(weights, stats, group, scales, rounded) for scales in tries]
    first = sorted(range(len(tries)), key=errors.__getitem__)[:_FINALISTS]
    block = _Block(problem, weights, group)
    return min((tries[i] for i in {0, *first}), key=lambda s: block.error(stats, s, rounded))


def fixed(weights: Weights, stats: Mapping[str, InputStats], group: SmoothingGroup) -> torch.Tensor:
    """Scales [channels] without a search."""
    return storable(weights, group, candidate(stats[group.linears[0]], group, FIXED_RATIO))


class _Block:
    """The output of attention or ffn on the sample, with the matrices of one group rounded."""

    def __init__(self, problem: LayerProblem, weights: Weights, group: SmoothingGroup) -> None:
        self._weights, self._group = weights, group
        self._compute = problem.attention if group.block == "attention" else problem.ffn
        self._inputs = problem.sample
        if group.block == "ffn":
            residual = problem.spec.layers[problem.index].residual_scale
            self._inputs = problem.sample + residual * problem.attention(weights, problem.sample)
        self._wanted = self._compute(weights, self._inputs)

    def error(self, stats: Mapping[str, InputStats], scales: torch.Tensor, rounded: Round) -> float:
        """Mean square of what changes."""
        inputs = self._group.to_inputs(scales)
        changed = fold(self._weights, self._group, scales)
        for name in self._group.linears:
            key = f"{name}.weight"
            changed[key] = rounded(name, changed[key], fold_stats(stats[name], inputs))
        return float((self._compute({**self._weights, **changed}, self._inputs) - self._wanted).pow(2).mean())
