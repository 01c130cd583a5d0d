"""Rounding column after column, each error made good by the columns that follow (GPTQ, Frantar et al. 2022,
arXiv 2210.17323), on a grid settled before.

Groups are of consecutive inputs whatever the order of the columns is, so files need no order of their own.
"""

from __future__ import annotations

import torch

from lmdeploy.lite.rounding import Grid

_BLOCK = 64  # columns whose errors are passed on to the rest at once


def damped(gram: torch.Tensor, damping: float) -> torch.Tensor:
    """gram + damping x its mean diagonal; inputs that never occur get 1 there."""
    diagonal = gram.diagonal()
    added = damping * diagonal.mean() + (diagonal <= 0).float()
    return gram + torch.diag(added)


def compensated_codes(
    weight: torch.Tensor, grid: Grid, gram: torch.Tensor, *, damping: float = 0.01, act_order: bool = True
) -> torch.Tensor:
    """Codes float32 [N, K] of weight [N, K] for inputs with this gram matrix [K, K].

    act_order: columns with the largest inputs first (the paper's public code calls it so).
    """
    order = torch.argsort(gram.diagonal(), descending=True, stable=True)
    if not act_order:
        order = torch.arange(len(gram), device=gram.device)
    upper = _inverse_factor(damped(gram, damping)[order][:, order])
    left = weight[:, order].T.contiguous()
    scales = grid.spread(grid.scales)[:, order].T.contiguous()
    zeros = grid.spread(grid.zeros)[:, order].T.contiguous()
    codes = torch.empty_like(left)
    for start in range(0, len(order), _BLOCK):
        stop = min(start + _BLOCK, len(order))
        errors = torch.empty_like(left[start:stop])
        for k in range(start, stop):
            code = (left[k] / scales[k] + zeros[k]).round_().clamp_(grid.lowest, grid.highest)
            codes[k] = code
            error = (left[k] - (code - zeros[k]) * scales[k]) / upper[k, k]
            errors[k - start] = error
            left[k + 1 : stop].addr_(upper[k, k + 1 : stop], error, alpha=-1.0)
        left[stop:] -= upper[start:stop, stop:].T @ errors
    result = torch.empty_like(codes)
    result[order] = codes
    return result.T.contiguous()


def _inverse_factor(gram: torch.Tensor) -> torch.Tensor:
    """U upper triangular with U^T U = gram^-1; row k from the diagonal on holds what column k passes on.

    In float64; damping grows tenfold until the factor exists.
    """
    wide = gram.double()
    even = torch.eye(len(wide), dtype=wide.dtype, device=wide.device)
    for power in range(6):
        extra = (10.0**power - 1) * 1e-3 * wide.diagonal().mean()
        factor, failed = torch.linalg.cholesky_ex(wide + extra * even)
        if not failed:
            break
    inverse = torch.cholesky_inverse(factor)
    return torch.linalg.cholesky(inverse, upper=True).float()
