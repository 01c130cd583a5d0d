"""Error-compensating rounding against the paper's formula in float64, and what refinement promises."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
import torch

from lmdeploy.lite.clip import clipped_grid, gram_blocks, group_errors
from lmdeploy.lite.gptq import compensated_codes, damped
from lmdeploy.lite.refine import descended_codes, refitted_grid, row_errors
from lmdeploy.lite.rounding import Grid, full_grid
from lmdeploy.quant.scheme import WHOLE_ROW, WeightScheme

N, K = 40, 168
SCHEMES = [
    WeightScheme(4, 64, False),
    WeightScheme(4, 128, True),
    WeightScheme(8, 32, False),
    WeightScheme(4, WHOLE_ROW),
]


def problem(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights, and the gram matrix of correlated inputs of which some are large."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(N, K, generator=generator) * 0.05
    mixing = torch.randn(K, K, generator=generator) / K**0.5 + torch.eye(K)
    inputs = torch.randn(2000, K, generator=generator) @ mixing
    inputs[:, [3, 70, 165]] *= 20
    return weight, inputs.T @ inputs / len(inputs)


def by_the_paper(
    weight: npt.NDArray[np.float64], hessian: npt.NDArray[np.float64], grid: Grid, order: list[int]
) -> npt.NDArray[np.float64]:
    """Equations 2 and 3 of arXiv 2210.17323: the inverse shrinks by one row and column in each step."""
    scales = grid.spread(grid.scales).double().numpy()
    zeros = grid.spread(grid.zeros).double().numpy()
    left, inverse, codes = weight.copy(), np.linalg.inv(hessian), np.zeros_like(weight)
    for q in order:
        code = np.clip(np.rint(left[:, q] / scales[:, q] + zeros[:, q]), grid.lowest, grid.highest)
        codes[:, q] = code
        error = left[:, q] - (code - zeros[:, q]) * scales[:, q]
        left -= np.outer(error / inverse[q, q], inverse[q])
        inverse = inverse - np.outer(inverse[:, q], inverse[q]) / inverse[q, q]
        inverse[q, :] = inverse[:, q] = 0
        inverse[q, q] = 1
    return codes


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("act_order", [False, True])
def test_codes_are_those_of_the_paper(scheme: WeightScheme, act_order: bool) -> None:
    weight, gram = problem()
    grid = full_grid(weight, scheme)
    ours = compensated_codes(weight, grid, gram, damping=0.01, act_order=act_order).numpy()
    diagonal = gram.double().numpy().diagonal()
    hessian = gram.double().numpy() + 0.01 * diagonal.mean() * np.eye(K)
    order = np.argsort(-diagonal, kind="stable").tolist() if act_order else list(range(K))
    theirs = by_the_paper(weight.double().numpy(), hessian, grid, order)
    same_rows = (ours == theirs).all(1).mean()
    assert same_rows >= 0.85  # a value within float32's error of the middle between two codes may differ
    assert compensated_codes(weight, grid, gram, act_order=act_order).equal(
        compensated_codes(weight, grid, gram, act_order=act_order)
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_step_lowers_the_output_error(scheme: WeightScheme) -> None:
    weight, gram = problem(1)
    full, narrow = full_grid(weight, scheme), clipped_grid(weight, scheme, gram)
    blocks = gram_blocks(gram, scheme)
    assert (group_errors(weight, narrow, blocks) <= group_errors(weight, full, blocks)).all()
    heavy = damped(gram, 0.01)
    codes = compensated_codes(weight, narrow, gram)

    def error(grid: Grid, codes: torch.Tensor) -> torch.Tensor:
        return row_errors(weight, grid.values(codes), heavy)

    errors = [error(narrow, narrow.codes(weight)), error(narrow, codes)]
    assert errors[1].sum() < 0.8 * errors[0].sum()
    moved = descended_codes(weight, narrow, heavy, codes)
    errors.append(error(narrow, moved))
    refitted = refitted_grid(weight, narrow, heavy, moved)
    errors.append(error(refitted, moved))
    for before, after in itertools.pairwise(errors[1:]):
        assert (after <= before * (1 + 1e-4)).all() and after.sum() < before.sum()
    assert refitted.scales.equal(refitted.scales.half().float()) and (refitted.scales > 0).all()


def test_inputs_that_never_occur_and_few_tokens() -> None:
    """A gram matrix of rank 3 with zero rows."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(3, K, generator=generator)
    inputs[:, 50:90] = 0
    weight, gram = problem()[0], inputs.T @ inputs / 3
    for scheme in SCHEMES:
        grid = clipped_grid(weight, scheme, gram)
        codes = compensated_codes(weight, grid, gram)
        codes = descended_codes(weight, grid, damped(gram, 0.01), codes)
        grid = refitted_grid(weight, grid, damped(gram, 0.01), codes)
        values = grid.values(codes)
        assert values.isfinite().all()
        assert values.abs().max() <= 1.5 * weight.abs().max()
    zero = torch.zeros(K, K)
    grid = clipped_grid(weight, SCHEMES[0], zero)
    assert compensated_codes(weight, grid, zero).equal(grid.codes(weight))
