"""What the turns of a run say together: a figure for each side and row, ratios of turns of the same round.

Ratios compare turns of one round, so that a host that is slower for a while slows both. Knows no targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from measure.records import Record, Records
from measure.rows import ACCURACIES, CASES, MODELS, OURS, SIDES, Case
from measure.statistics import interval, median, spread


@dataclass(frozen=True, slots=True)
class Figure:
    """Tokens a second of one side in one row."""

    value: float
    spread: float
    rounds: int
    others: float  # largest share of the CPU that others took in a turn


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median over rounds and the bounds that hold it nine times in ten."""

    value: float
    low: float
    high: float
    pairs: int

    @staticmethod
    def of(values: Sequence[float]) -> Ratio:
        return Ratio(median(values), *interval(values), len(values))


def rate(case: Case, record: Record) -> float:
    return float(record["decode" if case.decodes else "prefill"])


class Results:
    def __init__(self, records: Records) -> None:
        self.turns = records.turns()
        self.failures = records.failures()

    def rows(self) -> list[tuple[str, Case]]:
        """Those that have a figure, models and cases in their usual order."""
        there = {(model, case) for model, case, _ in self.turns}
        return [(m, CASES[c]) for m in MODELS for c in CASES if (m, c) in there]

    def sides(self, model: str, case: Case) -> list[str]:
        """Ours first, then the peers, in their usual order."""
        order = {side.name: place for place, side in enumerate(SIDES)}
        there = [side for m, c, side in self.turns if (m, c) == (model, case.name)]
        return sorted(there, key=lambda side: order.get(side, len(order)))

    def figure(self, model: str, case: Case, side: str) -> Figure | None:
        turns = self.turns.get((model, case.name, side))
        if not turns:
            return None
        values = [rate(case, r) for r in turns]
        return Figure(median(values), spread(values), len(values), max(r["others"] for r in turns))

    def fastest_peer(self, model: str, case: Case) -> str | None:
        peers = [s for s in self.sides(model, case) if not s.startswith(f"{OURS} ")]
        figures = {s: self.figure(model, case, s) for s in peers}
        return max(peers, key=lambda s: figures[s].value, default=None)  # type: ignore[union-attr]

    def ratio(self, model: str, case: Case, side: str, other: str) -> Ratio | None:
        """Speed of `side` over that of `other`, turns of the same round paired."""
        both = [self.turns.get((model, case.name, s), []) for s in (side, other)]
        first, second = ({r["round"]: rate(case, r) for r in turns} for turns in both)
        values = [first[i] / second[i] for i in sorted(first.keys() & second.keys())]
        return Ratio.of(values) if values else None

    def to_peer(self, model: str, case: Case, accuracy: str) -> Ratio | None:
        peer = self.fastest_peer(model, case)
        return self.ratio(model, case, f"{OURS} {accuracy}", peer) if peer else None

    def to_limit(self, model: str, case: Case, variant: str) -> Ratio | None:
        """Decode of one sequence: time over the time to read what must be read. Prefill: share of the peak.

        The limit is that of the same turn.
        """
        turns = self.turns.get((model, case.name, f"{OURS} {variant}"), [])
        values = [limit_ratio(case, r, variant) for r in turns]
        there = [v for v in values if v is not None]
        return Ratio.of(there) if there else None


def limit_ratio(case: Case, record: Record, variant: str) -> float | None:
    """`exact` computes every product twice, so its peak is half; bf16 weights use the 16-bit dot product."""
    if case.name.startswith("prefill"):
        int8 = record["int8_peak"]
        peak = {"exact": int8 / 2, "bf16": record["float_peak"]}.get(variant, int8)
        return 2 * float(record["linear_parameters"]) * float(record["prefill"]) / float(peak)
    if case.sequences == 1:
        context = case.prompt + case.new / 2
        needed = (record["weight_bytes"] + context * record["kv_bytes"]) / record["read"]
        return 1 / record["decode"] / float(needed)
    return None


def variants_of(results: Results, model: str) -> list[str]:
    """Of ours, that have a figure for the model."""
    there = {side for m, _, side in results.turns if m == model}
    return [v for v in (*ACCURACIES, "bf16") if f"{OURS} {v}" in there]
