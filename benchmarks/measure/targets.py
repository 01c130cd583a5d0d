"""The targets of the comparison and whether a run met them. One without a figure is neither."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from measure.results import Ratio, Results
from measure.rows import FEW, MODELS, OURS, Case
from measure.statistics import geometric_mean


@dataclass(frozen=True, slots=True)
class Target:
    """`value` is None where the run has no figure for it."""

    what: str
    bound: float
    at_least: bool
    value: float | None
    interval: tuple[float, float] | None = None

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        met = self.value >= self.bound if self.at_least else self.value <= self.bound
        return "met" if met else "missed"


def _of(what: str, bound: float, ratio: Ratio | None, at_least: bool = True) -> Target:
    if ratio is None:
        return Target(what, bound, at_least, None)
    bounds = (ratio.low, ratio.high) if ratio.pairs > 1 else None
    return Target(what, bound, at_least, ratio.value, bounds)


def close_sides(results: Results, model: str, case: Case) -> list[str]:
    """Sides of a row whose ratio to the fastest peer, or to the limit, is within a tenth of its bound."""
    close: dict[str, None] = {}
    for accuracy in ("fast", "auto") if case.decodes else ("fast",):
        ratio, peer = results.to_peer(model, case, accuracy), results.fastest_peer(model, case)
        if ratio is not None and peer is not None and abs(ratio.value - 1) < 0.1:
            close |= {f"{OURS} {accuracy}": None, peer: None}
    limit = results.to_limit(model, case, "auto") if case.name == "decode1" else None
    if limit is not None and abs(limit.value / _read_bound(model) - 1) < 0.1:
        close[f"{OURS} auto"] = None
    return list(close)


def _read_bound(model: str) -> float:
    """Most of the time to read what must be read that decode of one sequence may take."""
    return 1.3 if model == "135m" else 1.1


def targets(results: Results) -> list[Target]:
    return [*_limits(results), *_peers(results), *_accuracies(results)]


def _limits(results: Results) -> Iterator[Target]:
    for model, case in results.rows():
        if case.name == "decode1":
            bound = _read_bound(model)
            ratio = results.to_limit(model, case, "auto")
            yield _of(f"{model} decode, 1 sequence, auto: time / time to read", bound, ratio, at_least=False)
        elif model == "1b" and not case.decodes:
            what = f"1b prefill {case.prompt}"
            yield _of(f"{what}, fast: share of the int8 peak", 0.7, results.to_limit(model, case, "fast"))
            exact = results.to_limit(model, case, "exact")
            yield _of(f"{what}, exact: share of half the int8 peak", 0.75, exact)
        if model == "1b" and case.name in ("decode1", "prefill512", "prefill2048"):
            yield _bf16(results, case)


def _bf16(results: Results, case: Case) -> Target:
    ratio = results.to_limit("1b", case, "bf16")
    if not case.decodes:
        return _of(f"1b {case.name}, bf16 weights: share of the bf16 peak", 0.85, ratio)
    inverse = None if ratio is None else Ratio(1 / ratio.value, 1 / ratio.high, 1 / ratio.low, ratio.pairs)
    return _of(f"1b {case.name}, bf16 weights: share of read bandwidth", 0.95, inverse)


def _peers(results: Results) -> Iterator[Target]:
    ratios = []
    for model, case in results.rows():
        ratio = results.to_peer(model, case, "fast")
        yield _of(f"{model} {case.name}, fast: speed / fastest peer", 1.0, ratio)
        if ratio is not None and model not in FEW:
            ratios.append(ratio.value)
    mean = geometric_mean(ratios) if ratios else None
    yield Target(
        f"geometric mean of {len(ratios)} rows up to {MODELS[-2]}, fast / fastest peer", 1.5, True, mean
    )
    for model, case in results.rows():
        if case.decodes:
            ratio = results.to_peer(model, case, "auto")
            yield _of(f"{model} {case.name}, auto: speed / fastest peer", 1.0, ratio)


def _accuracies(results: Results) -> Iterator[Target]:
    for accuracy, bound in (("auto", 0.75), ("exact", 0.45)):
        worst, where = _worst(
            results, lambda m, c, a=accuracy: results.ratio(m, c, f"{OURS} {a}", f"{OURS} fast")
        )
        yield _of(f"{accuracy}: speed / fast, least of all rows{where}", bound, worst)


def _worst(results: Results, ratio: Callable[[str, Case], Ratio | None]) -> tuple[Ratio | None, str]:
    found = [(r.value, f" ({m} {c.name})", r) for m, c in results.rows() if (r := ratio(m, c)) is not None]
    if not found:
        return None, ""
    _, where, least = min(found, key=lambda x: x[0])
    return least, where
