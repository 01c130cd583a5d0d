"""Rounding column after column, each error made good by the columns that follow (GPTQ, Frantar et al. 2022,
arXiv 2210.17323), on a grid settled before.

Groups are of consecutive columns of the matrix as it comes, whatever the order they are rounded in: files
need no order of their own unless the caller has put the columns in another one.
"""

from __future__ import annotations

import torch

from lmdeploy.lite.rounding import Grid

_BLOCK = 64  # columns whose errors are passed on to the rest at once


def damped(gram: torch.Tensor, damping: float) -> torch.Tensor:
    """gram + damping x its mean diagonal; inputs that never occur get 1 there."""
    heavy, diagonal = gram.clone(), gram.diagonal()
    heavy.diagonal().add_(damping * diagonal.mean() + (diagonal <= 0).float())
    return heavy


def by_size(gram: torch.Tensor) -> torch.Tensor:
    """The inputs, those of largest mean square first."""
    return torch.argsort(gram.diagonal(), descending=True, stable=True)


def compensated_codes(
    weight: torch.Tensor, grid: Grid, gram: torch.Tensor, *, damping: float = 0.01, act_order: bool = True
) -> torch.Tensor:
    """Codes float32 [N, K] of weight [N, K] for inputs with this gram matrix [K, K].

    act_order: columns with the largest inputs first (the paper's public code calls it so).
    """
    order = by_size(gram) if act_order else torch.arange(len(gram), device=gram.device)
    upper = _inverse_factor(damped(gram, damping)[order[:, None], order])
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

    In float64, where few such matrices are held at once: of a large model each takes a gigabyte. Damping
    grows tenfold until the factor exists.
    """
    wide = gram.double()
    plain = wide.diagonal().clone()
    for power in range(6):
        wide.diagonal().copy_(plain + (10.0**power - 1) * 1e-3 * plain.mean())
        factor, failed = torch.linalg.cholesky_ex(wide)
        if not failed:
            break
    del wide
    inverse = torch.cholesky_inverse(factor)
    del factor
    return torch.linalg.cholesky(inverse, upper=True).float()
