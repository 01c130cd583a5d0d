"""The targets of quantisation and whether a run met them, on the demo model and on its grid-free twin.

A target is met when both models meet it; one without a figure for both is not measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from measure.targets import Target

from lite.results import Results
from lite.sides import AWQ, CURVE, MODELS, NARROW, SMOOTH, TARGET_BITS, WIDE
from lite.sizes import share_of_float16

FACTORS = {4.5: 1.10}  # perplexity over the original's at so many bits


def targets(results: Results) -> list[Target]:
    return [*_methods(results), *_bits(results), *_others(results)]


def _methods(results: Results) -> Iterator[Target]:
    share = [results.to_plain(model, WIDE, AWQ) for model in MODELS]
    yield _worse("AWQ, group 128: increase of perplexity / plain rounding's", 0.7, share)
    name, value = results.best_ours(WIDE, lambda model, side: results.to_plain(model, WIDE, side))
    yield Target(f"best method{_named(name)}, group 128: increase / plain rounding's", 0.5, False, value)
    name, value = results.best_ours(NARROW, results.to_rival)
    rivals = ", ".join(dict.fromkeys(filter(None, map(results.best_rival, MODELS)))) or "none ran"
    yield Target(
        f"best method{_named(name)}, group 64: increase / best rival's ({rivals})", 0.9, False, value
    )


def _named(method: str | None) -> str:
    return "" if method is None else f" ({method})"


def _bits(results: Results) -> Iterator[Target]:
    for bits in TARGET_BITS:
        share = partial(_to_curve, results, bits)
        yield _worse(f"{bits} bits: KL / llama.cpp's curve there", 1.0, [share(model) for model in MODELS])
    for bits, bound in FACTORS.items():
        factors = [_factor(results, model, CURVE, f"{bits} bits") for model in MODELS]
        yield _worse(f"{bits} bits: perplexity / original's", bound, factors)


def _to_curve(results: Results, bits: float, model: str) -> float | None:
    found = results.get(model, CURVE, f"{bits} bits")
    if found is None:
        return None
    curve = results.curve(model, max(bits, found["bits_per_weight"]))
    return None if curve is None else float(found["kl"] / curve)


def _others(results: Results) -> Iterator[Target]:
    factors = [_factor(results, model, SMOOTH, "smooth_quant") for model in MODELS]
    yield _worse("W8A8: perplexity / original's", 1.02, factors)
    for place, share in share_of_float16().items():
        yield Target(
            f"7B shape, embedding and head in 8 bits, {place}: bytes / float16's", 0.30, False, share
        )


def _factor(results: Results, model: str, case: str, side: str) -> float | None:
    increase = results.increase(model, case, side)
    return None if increase is None else 1 + increase


def _worse(what: str, bound: float, values: list[float | None]) -> Target:
    known = [value for value in values if value is not None]
    return Target(what, bound, False, max(known) if len(known) == len(values) else None)
