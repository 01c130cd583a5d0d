"""Rounding a matrix to group-wise integers: the grid of values, codes on it, the stored tensor.

A grid's scales are float16 values and its zero points integers before any code is chosen, so that what is
computed here is what every reader of the file computes. Knows no inputs of the matrix (`clip`, `gptq` do).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from lmdeploy.quant.scheme import WHOLE_ROW, WeightScheme
from lmdeploy.quant.tensors import GroupedTensor

_LARGEST, _SMALLEST = 65504.0, 2.0**-24  # of float16, the smallest above zero


@dataclass(frozen=True, slots=True)
class Grid:
    """The values (code - zero) * scale of each channel and group; scales, zeros float32 [N, groups].

    Codes run from `lowest` to `highest`; those of 8 symmetric bits are signed and have no zero point.
    """

    scheme: WeightScheme
    inputs: int
    scales: torch.Tensor
    zeros: torch.Tensor

    @property
    def lowest(self) -> int:
        return -127 if _signed(self.scheme) else 0

    @property
    def highest(self) -> int:
        return 127 if _signed(self.scheme) else (1 << self.scheme.bits) - 1

    @property
    def group(self) -> int:
        return group_length(self.scheme, self.inputs)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """[N, groups] -> [N, K]: of each input its group's value."""
        return values.repeat_interleave(self.group, 1)[:, : self.inputs]

    def codes(self, weight: torch.Tensor) -> torch.Tensor:
        """The nearest codes of float32 [N, K], as float32."""
        codes = in_groups(weight, self.scheme) / self.scales[..., None]
        codes = codes.add_(self.zeros[..., None]).round_().clamp_(self.lowest, self.highest)
        return codes.flatten(1)[:, : self.inputs]

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        values = in_groups(codes, self.scheme) - self.zeros[..., None]
        return values.mul_(self.scales[..., None]).flatten(1)[:, : self.inputs]

    def tensor(self, codes: torch.Tensor) -> GroupedTensor:
        """As formats write it."""
        kind = np.int8 if _signed(self.scheme) else np.uint8
        zeros = None if _signed(self.scheme) else self.zeros.cpu().numpy().astype(np.uint8)
        stored = codes.cpu().numpy().astype(kind)
        scales = self.scales.cpu().numpy().astype(np.float16)
        return GroupedTensor(self.scheme.bits, self.group, stored, scales, zeros)


def group_length(scheme: WeightScheme, inputs: int) -> int:
    return inputs if scheme.group_size == WHOLE_ROW else min(scheme.group_size, inputs)


def in_groups(weight: torch.Tensor, scheme: WeightScheme) -> torch.Tensor:
    """[..., K] -> [..., groups, group]; a shorter last group is filled with zeros."""
    length = group_length(scheme, weight.shape[-1])
    padded = functional.pad(weight, (0, -weight.shape[-1] % length))
    return padded.view(*weight.shape[:-1], -1, length)


def value_range(weight: torch.Tensor, scheme: WeightScheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest value of each group [N, groups], zero included (a zero point must be a code)."""
    groups = in_groups(weight, scheme)
    return groups.amin(-1).clamp(max=0.0), groups.amax(-1).clamp(min=0.0)


def grid_between(low: torch.Tensor, high: torch.Tensor, scheme: WeightScheme, inputs: int) -> Grid:
    """The grid that spans low <= 0 <= high [N, groups]; symmetric ones span the larger of the two. Where a
    zero point of 0 is not to be had, values above it have one code less.

    Symmetric grids have one code more below zero than above (scale: twice the largest by the number of
    steps); at 8 bits that code is not used.
    """
    steps = (1 << scheme.bits) - 1
    if scheme.symmetric:
        span = 2 * torch.maximum(-low, high)
        steps -= scheme.bits == 8
    else:
        span = torch.maximum(high - low, high * (steps / (steps - scheme.least_zero)))
    scales = float16_scales(span / steps)
    if _signed(scheme):
        zeros = torch.zeros_like(scales)
    elif scheme.symmetric:
        zeros = torch.full_like(scales, 1 << (scheme.bits - 1))
    else:
        zeros = (-low / scales).round_().clamp_(scheme.least_zero, steps)
    return Grid(scheme, inputs, scales, zeros)


def float16_scales(scales: torch.Tensor) -> torch.Tensor:
    """Rounded to float16, in float32: positive and finite, 1 where nothing is to be scaled."""
    rounded = scales.clamp(_SMALLEST, _LARGEST).half().float()
    return torch.where(scales > 0, rounded, torch.ones_like(rounded))


def full_grid(weight: torch.Tensor, scheme: WeightScheme) -> Grid:
    """The grid over all values of each group."""
    return grid_between(*value_range(weight, scheme), scheme, weight.shape[1])


def _signed(scheme: WeightScheme) -> bool:
    return scheme.symmetric and scheme.bits == 8
