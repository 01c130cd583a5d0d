"""Narrowing the range of each group: the values beyond it cost less than the finer steps inside it gain.

The error of a group is that of its part of the output over the calibration inputs, from the block of the
gram matrix that belongs to it (AWQ, arXiv 2306.00978, appendix; the search there is over samples).
"""

from __future__ import annotations

import torch

from lmdeploy.lite.rounding import Grid, grid_between, group_length, in_groups, value_range
from lmdeploy.quant.scheme import WeightScheme

_SHARES = tuple(1 - 0.05 * step for step in range(11))  # of the range


def gram_blocks(gram: torch.Tensor, scheme: WeightScheme) -> torch.Tensor:
    """[groups, group, group]: the part of gram [K, K] inside each group of inputs."""
    length = group_length(scheme, gram.shape[0])
    starts = range(0, gram.shape[0], length)
    blocks = gram.new_zeros(len(starts), length, length)
    for block, start in zip(blocks, starts, strict=True):
        part = gram[start : start + length, start : start + length]
        block[: len(part), : len(part)] = part
    return blocks


def group_errors(weight: torch.Tensor, grid: Grid, blocks: torch.Tensor) -> torch.Tensor:
    """[N, groups]: mean square over tokens of what rounding a group changes in its part of the output."""
    off = in_groups(grid.values(grid.codes(weight)) - weight, grid.scheme).transpose(0, 1)
    return ((off @ blocks) * off).sum(-1).T


def clipped_grid(weight: torch.Tensor, scheme: WeightScheme, gram: torch.Tensor) -> Grid:
    """The best of some narrower grids, for each channel and group on its own; both ends move apart from
    each other unless the scheme is symmetric. The full range is among them."""
    low, high = value_range(weight, scheme)
    blocks = gram_blocks(gram, scheme)
    best = _Best(weight, scheme, blocks)
    for share in _SHARES:
        best.try_range(low * share, high * share)
    if not scheme.symmetric:
        for share in _SHARES[1:6]:
            low, high = best.low, best.high
            best.try_range(low * share, high)
            best.try_range(low, high * share)
    return grid_between(best.low, best.high, scheme, weight.shape[1])


class _Best:
    """The range of least error so far."""

    def __init__(self, weight: torch.Tensor, scheme: WeightScheme, blocks: torch.Tensor) -> None:
        self._weight, self._scheme, self._blocks = weight, scheme, blocks
        self.low, self.high = value_range(weight, scheme)
        self._error = torch.full_like(self.low, torch.inf)

    def try_range(self, low: torch.Tensor, high: torch.Tensor) -> None:
        grid = grid_between(low, high, self._scheme, self._weight.shape[1])
        error = group_errors(self._weight, grid, self._blocks)
        better = error < self._error
        self._error = torch.where(better, error, self._error)
        self.low, self.high = torch.where(better, low, self.low), torch.where(better, high, self.high)
