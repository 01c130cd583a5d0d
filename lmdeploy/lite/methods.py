"""From a recipe to the function that quantises one layer: scales, then the grid, then the codes.

Every matrix of a layer goes through the same three steps; a method says which of them are done. Matrices that
saw no tokens (experts that no text chose, K38) are rounded plainly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from lmdeploy.lite import awq, smooth_quant
from lmdeploy.lite.clip import clipped_grid
from lmdeploy.lite.gptq import by_size, compensated_codes, damped
from lmdeploy.lite.problem import LayerProblem, LayerResult, LinearReport, Quantise
from lmdeploy.lite.recipe import Recipe
from lmdeploy.lite.refine import descended_codes, refitted_grid, row_errors
from lmdeploy.lite.rounding import Grid, full_grid
from lmdeploy.lite.smoothing import SmoothingGroup, fold, fold_stats, smoothing_groups
from lmdeploy.quant.scheme import WeightScheme
from lmdeploy.quant.tensors import GroupedTensor

_REFINEMENTS = 2  # of scales and codes after the first pass; docs/decisions/0013 has what they gain
FEWEST_TOKENS = 32  # below, statistics say more about the sample than about the matrix


def quantiser(recipe: Recipe) -> Quantise:
    """What turns each layer's problem into its result; deterministic."""

    def quantise(problem: LayerProblem) -> LayerResult:
        with torch.no_grad():
            return _Layer(problem, recipe).result()

    return quantise


@dataclass(frozen=True, slots=True)
class _Steps:
    scales: bool
    clip: bool
    compensate: bool


def _steps(recipe: Recipe) -> _Steps:
    parts = recipe.method.split("+")
    return _Steps("awq" in parts or recipe.method == "smooth_quant", recipe.clip, "gptq" in parts)


class _Layer:
    """One layer on its way; weights and statistics are those after the scales folded so far."""

    def __init__(self, problem: LayerProblem, recipe: Recipe) -> None:
        self._problem, self._recipe, self._steps = problem, recipe, _steps(recipe)
        self._weights, self._stats = dict(problem.weights), dict(problem.stats)
        self._scaled: set[str] = set()

    def result(self) -> LayerResult:
        if self._steps.scales:
            self._fold_scales()
        tensors: dict[str, GroupedTensor | torch.Tensor] = {n: self._weights[n] for n in self._scaled}
        reports = []
        for name, scheme in self._problem.schemes.items():
            if scheme is not None:
                tensors[f"{name}.weight"], report = self._round(name, scheme)
                reports.append(report)
        plain = {n: t.cpu().numpy() if isinstance(t, torch.Tensor) else t for n, t in tensors.items()}
        return LayerResult(plain, tuple(reports))

    def _fold_scales(self) -> None:
        for group in smoothing_groups(self._problem.spec, self._problem.index):
            rounded = any(self._problem.schemes.get(name) for name in group.linears)
            if not rounded or not all(self._seen(name) for name in group.linears):
                continue
            scales = self._scales(group)
            changed = fold(self._weights, group, scales)
            self._weights.update(changed)
            self._scaled.update(changed)
            inputs = group.to_inputs(scales)
            for name in group.linears:
                self._stats[name] = fold_stats(self._stats[name], inputs)

    def _scales(self, group: SmoothingGroup) -> torch.Tensor:
        stats = self._stats[group.linears[0]]
        if self._recipe.method == "smooth_quant":
            if self._recipe.search_scale:
                return smooth_quant.searched(self._weights, stats, group)
            return smooth_quant.candidate(self._weights, stats, group, smooth_quant.FIXED_RATIO)
        if self._recipe.search_scale:
            return awq.searched(self._problem, self._weights, self._stats, group, self._plainly)
        return awq.fixed(self._weights, self._stats, group)

    def _seen(self, name: str) -> bool:
        return name in self._stats and self._stats[name].tokens >= FEWEST_TOKENS

    def _plainly(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        scheme = self._problem.schemes.get(name)
        if scheme is None:
            return weight
        grid = full_grid(weight, scheme)
        return grid.values(grid.codes(weight))

    def _round(self, name: str, scheme: WeightScheme) -> tuple[GroupedTensor, LinearReport]:
        weight = self._weights[f"{name}.weight"]
        bits = scheme.bits_per_weight(weight.shape[1])
        if not self._seen(name):
            return self._unseen(name, weight, full_grid(weight, scheme), bits)
        gram, order = self._stats[name].gram, None
        if scheme.ordered:
            order = by_size(gram)
            weight, gram = weight[:, order], gram[order[:, None], order]
        grid = clipped_grid(weight, scheme, gram) if self._steps.clip else full_grid(weight, scheme)
        if self._steps.compensate:
            grid, codes = self._compensated(weight, grid, gram)
        else:
            codes = grid.codes(weight)
        error = _output_error(weight, grid.values(codes), gram)
        size = _output_error(weight, torch.zeros_like(weight), gram)
        tensor = grid.tensor(codes)
        if order is not None:
            tensor = replace(tensor, order=order.cpu().numpy().astype(np.int32))
        return tensor, LinearReport(name, bits, error / size if size > 0 else 0.0)

    def _unseen(
        self, name: str, weight: torch.Tensor, grid: Grid, bits: float
    ) -> tuple[GroupedTensor, LinearReport]:
        """Without statistics: rounded plainly, and the error is that of the weights."""
        codes, tokens = grid.codes(weight), self._stats[name].tokens if name in self._stats else 0
        lost, size = (float(x.square().sum()) for x in (grid.values(codes) - weight, weight))
        note = f"{tokens} tokens seen: rounded plainly, the error is that of the weights"
        return grid.tensor(codes), LinearReport(name, bits, lost / size if size > 0 else 0.0, note)

    def _compensated(self, weight: torch.Tensor, grid: Grid, gram: torch.Tensor) -> tuple[Grid, torch.Tensor]:
        recipe = self._recipe
        codes = compensated_codes(weight, grid, gram, damping=recipe.damping, act_order=recipe.act_order)
        heavy = damped(gram, recipe.damping)
        for _ in range(_REFINEMENTS):
            grid = refitted_grid(weight, grid, heavy, codes)
            codes = descended_codes(weight, grid, heavy, codes)
        return grid, codes


def _output_error(weight: torch.Tensor, values: torch.Tensor, gram: torch.Tensor) -> float:
    return float(row_errors(weight, values, gram).sum())
