"""What a run found, by model, case and side: increases, ratios, llama.cpp's curve between its points."""

from __future__ import annotations

import itertools
import math
from typing import Any

from measure.records import Records

from lite.sides import CURVE, KINDS, MODELS, NARROW, OURS, PLAIN, RIVALS, SIDES

Found = dict[str, Any]


class Results:
    """The last figure of each side; the original's perplexity stands for an increase of nothing."""

    def __init__(self, records: Records) -> None:
        known = {(side.case, side.name) for side in SIDES}
        self._turns = {key: turns[-1] for key, turns in records.turns().items() if (key[1], key[2]) in known}
        self.failures = {key: error for key, error in records.failures().items() if key[1:] in known}

    def get(self, model: str, case: str, side: str) -> Found | None:
        return self._turns.get((model, case, side))

    def models(self) -> list[str]:
        return [model for model in MODELS if self.get(model, "original", "original")]

    def sides(self, model: str, case: str) -> list[str]:
        """Those with a figure, in the order of the table of sides."""
        names = dict.fromkeys(side.name for side in SIDES if side.case == case)
        return [name for name in names if self.get(model, case, name)]

    def increase(self, model: str, case: str, side: str) -> float | None:
        """Perplexity over the original's, less 1."""
        found, base = self.get(model, case, side), self.get(model, "original", "original")
        return None if found is None or base is None else found["perplexity"] / base["perplexity"] - 1

    def to_plain(self, model: str, case: str, side: str) -> float | None:
        """Increase as a share of that of plain rounding in the same groups."""
        return _ratio(self.increase(model, case, side), self.increase(model, case, PLAIN))

    def best_rival(self, model: str) -> str | None:
        """Of least increase."""
        known = {r.name: x for r in RIVALS if (x := self.increase(model, NARROW, r.name)) is not None}
        return min(known, key=known.__getitem__) if known else None

    def to_rival(self, model: str, side: str) -> float | None:
        """Increase as a share of that of the best rival."""
        rival = self.best_rival(model)
        return _ratio(self.increase(model, NARROW, side), self.increase(model, NARROW, rival or ""))

    def best_ours(self, case: str, measure: Any) -> tuple[str | None, float | None]:
        """The method of least `measure`(model, side), in the worse of the models; None unless all have it."""
        best: tuple[str | None, float | None] = None, None
        for side in OURS[1:]:
            values = [measure(model, side) for model in MODELS]
            if all(v is not None for v in values) and (best[1] is None or max(values) < best[1]):
                best = side, max(values)
        return best

    def curve(self, model: str, bits: float, matrix: bool = False) -> float | None:
        """llama.cpp's KL at so many bits: between two points the logarithm is linear, before the first and
        after the last point it is theirs."""
        suffix = " with imatrix" if matrix else ""
        found = (self.get(model, CURVE, f"{kind}{suffix}") for kind in KINDS)
        points = sorted((f["bits_per_weight"], f["kl"]) for f in found if f is not None)
        if not points:
            return None
        for (low, first), (high, last) in itertools.pairwise(points):
            if low <= bits <= high:
                share = (bits - low) / (high - low)
                return math.exp((1 - share) * math.log(first) + share * math.log(last))
        kl: float = points[0][1] if bits < points[0][0] else points[-1][1]
        return kl


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base
