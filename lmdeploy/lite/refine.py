"""Making codes and scales of a rounded matrix agree with each other: coordinate descent on the output error.

Codes: each column in turn takes the code that is best while all others stay (the step of Behdin et al. 2023,
QuantEase, arXiv 2309.01885), which never makes the error larger. Scales: for given codes the best are the
solution of one linear system for each channel; rounded to float16, and kept where they are better.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from lmdeploy.lite.rounding import Grid, float16_scales, in_groups

_BLOCK = 64  # columns whose changes reach the rest at once


def row_errors(weight: torch.Tensor, values: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """[N]: mean over tokens of ((weight - values) x)^2."""
    off = weight - values
    return ((off @ gram) * off).sum(1)


def descended_codes(
    weight: torch.Tensor, grid: Grid, gram: torch.Tensor, codes: torch.Tensor
) -> torch.Tensor:
    """Codes [N, K] after one pass over all columns; gram has no zero on its diagonal."""
    scales = grid.spread(grid.scales).T.contiguous()
    new = codes.T.contiguous()
    slope = gram @ (weight - grid.values(codes)).T  # [K, N]
    diagonal = gram.diagonal()
    for start in range(0, len(gram), _BLOCK):
        part = slice(start, min(start + _BLOCK, len(gram)))
        near, within = slope[part].clone(), gram[part, part]
        moved = torch.empty_like(near)
        for j, k in enumerate(range(part.start, part.stop)):
            better = (new[k] + near[j] / (diagonal[k] * scales[k])).round_().clamp_(grid.lowest, grid.highest)
            moved[j] = (better - new[k]) * scales[k]
            new[k] = better
            near[j + 1 :].addr_(within[j, j + 1 :], moved[j], alpha=-1.0)
        slope[part.stop :].addmm_(gram[part.stop :, part], moved, alpha=-1.0)
    return new.T.contiguous()


def refitted_grid(weight: torch.Tensor, grid: Grid, gram: torch.Tensor, codes: torch.Tensor) -> Grid:
    """The grid with the scales that suit these codes best, where that lowers a channel's error."""
    steps = codes - grid.spread(grid.zeros)
    count = grid.scales.shape[1]
    parts = in_groups(steps, grid.scheme)
    system = weight.new_empty(len(weight), count, count)
    for g in range(count):
        begin = g * grid.group
        seen = steps[:, begin : begin + grid.group] @ gram[begin : begin + grid.group]
        system[:, g] = (in_groups(seen, grid.scheme) * parts).sum(-1)
    wanted = (in_groups(weight @ gram, grid.scheme) * parts).sum(-1)
    ridge = system.diagonal(dim1=1, dim2=2).mean(1).clamp(min=1e-30) * 1e-6
    eye = torch.eye(count, device=weight.device) * ridge[:, None, None]
    change = torch.linalg.solve(system + eye, wanted - (system @ grid.scales[..., None])[..., 0])
    scales = grid.scales + change
    scales = torch.where((scales > 0) & scales.isfinite(), float16_scales(scales), grid.scales)
    new = replace(grid, scales=scales)
    lower = row_errors(weight, new.values(codes), gram) < row_errors(weight, grid.values(codes), gram)
    return replace(grid, scales=torch.where(lower[:, None], scales, grid.scales))
