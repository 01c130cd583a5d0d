"""Scales that move the difficulty of rounding activations to the weights (SmoothQuant, Xiao et al. 2022,
arXiv 2211.10438), for 8-bit weights with one scale a channel and 8-bit activations with one scale a token.

Scale of an input channel: max|x|^ratio / max|w|^(1 - ratio). Knows no layer; `methods` folds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from lmdeploy.lite.problem import InputStats
from lmdeploy.lite.rounding import full_grid
from lmdeploy.lite.smoothing import SmoothingGroup, fold_stats, storable
from lmdeploy.quant.scheme import WHOLE_ROW, WeightScheme

W8 = WeightScheme(8, WHOLE_ROW, True)
FIXED_RATIO = 0.5
_RATIOS = tuple(0.3 + step / 10 for step in range(6))


def candidate(
    weights: Mapping[str, torch.Tensor], stats: InputStats, group: SmoothingGroup, ratio: float
) -> torch.Tensor:
    """Scales by channel of the group's source; 1 where no value was seen or all weights are zero."""
    largest = torch.stack([weights[f"{name}.weight"].abs().amax(0) for name in group.linears]).amax(0)
    inputs, rows = group.to_channels(stats.max_abs), group.to_channels(largest)
    scales = inputs.pow(ratio) / rows.clamp(min=1e-5).pow(1 - ratio)
    usable = (inputs > 0) & (rows > 0)
    scales = torch.where(usable, scales, torch.ones_like(scales)).clamp(1e-4, 1e4)
    return storable(weights, group, scales)


def expected_error(
    weights: Mapping[str, torch.Tensor], stats: InputStats, group: SmoothingGroup, scales: torch.Tensor
) -> float:
    """Mean square of what rounding weights and activations changes in the group's outputs, about.

    Weights: from the gram matrix. Activations: each value is off by a part of a step that is evenly
    distributed. A token's step is its largest value / 127, for which stands what normal values of as many
    channels, each as strong as the strongest, would reach.
    """
    inputs = group.to_inputs(scales)
    seen = fold_stats(stats, inputs)
    strongest = float(seen.gram.diagonal().max())
    step = (2 * math.log(len(inputs)) * strongest) ** 0.5 / 127
    total = 0.0
    for name in group.linears:
        weight = weights[f"{name}.weight"] * inputs
        grid = full_grid(weight, W8)
        off = grid.values(grid.codes(weight)) - weight
        total += float(((off @ seen.gram) * off).sum() + step**2 / 12 * weight.pow(2).sum())
    return total


def searched(weights: Mapping[str, torch.Tensor], stats: InputStats, group: SmoothingGroup) -> torch.Tensor:
    """Of the ratios tried and of no scales at all, those of least expected error."""
    tries = [candidate(weights, stats, group, ratio) for ratio in _RATIOS]
    tries.append(torch.ones_like(tries[0]))
    return min(tries, key=lambda scales: expected_error(weights, stats, group, scales))
