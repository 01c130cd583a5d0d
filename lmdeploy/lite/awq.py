"""Activation-aware scales (AWQ, Lin et al. 2023, arXiv 2306.00978): input channels that matter are made
larger before rounding and smaller again by the tensor before.

A candidate is mean|x|^ratio; the one is taken with which rounding changes least in the output of the block
(attention or ffn) on the sample. First in coarse steps, then around the best.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from lmdeploy.lite.problem import InputStats, LayerProblem
from lmdeploy.lite.smoothing import SmoothingGroup, Weights, fold, storable

FIXED_RATIO = 0.5
_COARSE = tuple(step / 8 for step in range(9))
_FINE = ((-1 / 16, -1 / 32, 1 / 32, 1 / 16), (-1 / 64, 1 / 64))
_WINDOWS, _TOKENS = 4, 192  # of the sample: so many, and of each its beginning

Round = Callable[[str, torch.Tensor], torch.Tensor]
"""(name, weight) -> the values it is rounded to."""


def candidate(stats: InputStats, group: SmoothingGroup, ratio: float) -> torch.Tensor:
    """Scales by channel of the group's source, geometric mean of the extremes 1; channels that never occur
    keep the smallest."""
    strength = group.to_channels(stats.mean_abs).clamp(min=1e-6)
    scales = strength.pow(ratio).clamp(min=1e-4)
    return scales / (scales.max() * scales.min()).sqrt()


def fixed(weights: Weights, stats: Mapping[str, InputStats], group: SmoothingGroup) -> torch.Tensor:
    """Scales [channels] without a search."""
    return storable(weights, group, candidate(stats[group.linears[0]], group, FIXED_RATIO))


def searched(
    problem: LayerProblem,
    weights: Weights,
    stats: Mapping[str, InputStats],
    group: SmoothingGroup,
    rounded: Round,
) -> torch.Tensor:
    """Scales [channels] of least output error when `weights` (some groups folded already) are rounded."""
    block, errors = _Block(problem, weights, group), dict[float, float]()

    def scales(ratio: float) -> torch.Tensor:
        return storable(weights, group, candidate(stats[group.linears[0]], group, ratio))

    for ratio in _COARSE:
        errors[ratio] = block.error(scales(ratio), rounded)
    for steps in _FINE:
        best = min(errors, key=errors.__getitem__)
        for step in steps:
            errors[best + step] = block.error(scales(best + step), rounded)
    return scales(min(errors, key=errors.__getitem__))


class _Block:
    """The output of attention or ffn on the sample, with the matrices of one group rounded."""

    def __init__(self, problem: LayerProblem, weights: Weights, group: SmoothingGroup) -> None:
        self._weights, self._group = weights, group
        self._compute = problem.attention if group.block == "attention" else problem.ffn
        self._inputs = problem.sample[:_WINDOWS, :_TOKENS]
        if group.block == "ffn":
            residual = problem.spec.layers[problem.index].residual_scale
            self._inputs = self._inputs + residual * problem.attention(weights, self._inputs)
        self._wanted = self._compute(weights, self._inputs)

    def error(self, scales: torch.Tensor, rounded: Round) -> float:
        """Mean square of what changes."""
        changed = fold(self._weights, self._group, scales)
        for name in self._group.linears:
            key = f"{name}.weight"
            changed[key] = rounded(name, changed[key])
        return float((self._compute({**self._weights, **changed}, self._inputs) - self._wanted).pow(2).mean())
