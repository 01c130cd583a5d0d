"""What the inputs of a layer's matrices look like over all calibration tokens."""

from __future__ import annotations

import torch

from lmdeploy.lite.problem import InputStats
from lmdeploy.lite.smoothing import local_linears
from lmdeploy.models.spec import ModelSpec

_PARTS = 6  # of a gram matrix, which is symmetric: of each, what is right of its diagonal block is summed


class StatsGatherer:
    """Sums in float32, one addition for each window; matrices with the same `fed_by` share them."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        self._first: dict[str, str] = {}  # fed_by -> the first matrix that it feeds
        self._fed = {linear.name: linear.fed_by for linear in local_linears(spec, layer)}
        for name, fed in self._fed.items():
            self._first.setdefault(fed, name)
        self._sums: dict[str, _Sums] = {}

    def observe(self, name: str, x: torch.Tensor) -> None:
        """x [tokens, K] is what matrix `name` is fed."""
        fed = self._fed[name]
        if self._first[fed] == name:
            self._sums.setdefault(fed, _Sums(x.shape[1], x.device)).add(x)

    def largest(self) -> dict[str, torch.Tensor]:
        """The largest size of each input so far [K], by the first matrix that is fed it; NaN stays NaN."""
        return {self._first[fed]: sums.max for fed, sums in self._sums.items()}

    def stats(self) -> dict[str, InputStats]:
        """By name of each matrix that was fed anything."""
        by_input = {fed: sums.stats() for fed, sums in self._sums.items()}
        return {name: by_input[fed] for name, fed in self._fed.items() if fed in by_input}


class _Sums:
    def __init__(self, inputs: int, device: torch.device) -> None:
        self.tokens = 0
        size = max(64, -(-inputs // _PARTS))
        self._parts = [slice(i, min(i + size, inputs)) for i in range(0, inputs, size)]
        self.abs = torch.zeros(inputs, device=device)
        self.max = torch.zeros(inputs, device=device)
        self.gram = torch.zeros(inputs, inputs, device=device)

    def add(self, x: torch.Tensor) -> None:
        size = x.abs()
        self.tokens += len(x)
        self.abs += size.sum(0)
        torch.maximum(self.max, size.amax(0), out=self.max)
        for some in self._parts:
            self.gram[some, some.start :].addmm_(x[:, some].T, x[:, some.start :])

    def stats(self) -> InputStats:
        """Once: what was not summed is filled in."""
        for some in self._parts:
            self.gram[some.stop :, some] = self.gram[some, some.stop :].T
        return InputStats(self.tokens, self.abs / self.tokens, self.max, self.gram.div_(self.tokens))
