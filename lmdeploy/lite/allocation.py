"""Which scheme each matrix gets when all together may take so many bits.

A unit is some matrices that share a scheme (those with the same inputs: engines and files fuse them). Each
choice of a unit costs bits and divergence. What is wanted is the choice of least divergence within the bits:
a knapsack problem with one choice for each unit. Knows no weights and no schemes' meaning.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Choice:
    """What one scheme means for a unit. bits: of all its weights, scales and zero points."""

    bits: float
    divergence: float


@dataclass(frozen=True, slots=True)
class Allocation(Generic[Key]):
    """chosen: index of the choice of each unit. bound: no choice within the bits has less divergence."""

    chosen: Mapping[Key, int]
    bits: float
    divergence: float
    bound: float


def allocate(units: Mapping[Key, Sequence[Choice]], most_bits: float) -> Allocation[Key]:
    """Least divergence within most_bits, by steps of falling return along each unit's convex hull.

    Every prefix of those steps is the optimum for the bits it takes (Lagrange), so that only the bits left
    over at the end are spent by trial; `bound` is the optimum when units could be split. ValueError when not
    even the smallest choices fit.
    """
    chosen = {
        key: min(range(len(choices)), key=lambda i: _rank(choices[i])) for key, choices in units.items()
    }
    steps = sorted(
        (step for key, choices in units.items() for step in _hull_steps(key, choices, chosen[key])),
        key=lambda step: -step.gain,
    )
    bits = sum(units[key][i].bits for key, i in chosen.items())
    if bits > most_bits:
        raise ValueError(f"at least {bits:.0f} bits are needed, {most_bits:.0f} may be used")
    total = sum(units[key][i].divergence for key, i in chosen.items())
    bound, stuck = total, False
    for step in steps:
        if bits + step.bits > most_bits:
            stuck = True
            bound -= step.gain * (most_bits - bits)
            break
        chosen[step.key] = step.choice
        bits, total, bound = bits + step.bits, total - step.gain * step.bits, total - step.gain * step.bits
    if stuck:
        _spend_rest(units, chosen, most_bits - bits)
    bits = sum(units[key][i].bits for key, i in chosen.items())
    return Allocation(chosen, bits, sum(units[key][i].divergence for key, i in chosen.items()), bound)


@dataclass(frozen=True, slots=True)
class _Step(Generic[Key]):
    """From one corner of a unit's hull to the next: gain is divergence saved by bit."""

    key: Key
    choice: int
    bits: float
    gain: float


def _rank(choice: Choice) -> tuple[float, float]:
    return choice.bits, choice.divergence


def _hull_steps(key: Key, choices: Sequence[Choice], start: int) -> list[_Step[Key]]:
    """Gain falls from step to step."""
    steps: list[_Step[Key]] = []
    at = start
    while True:
        here = choices[at]
        larger = [i for i, c in enumerate(choices) if c.bits > here.bits and c.divergence < here.divergence]
        if not larger:
            return steps
        gains = {i: (here.divergence - choices[i].divergence) / (choices[i].bits - here.bits) for i in larger}
        best = max(larger, key=lambda i: (gains[i], choices[i].bits))
        steps.append(_Step(key, best, choices[best].bits - here.bits, gains[best]))
        at = best


def _spend_rest(units: Mapping[Key, Sequence[Choice]], chosen: dict[Key, int], rest: float) -> None:
    """The changes of single units that save most, as long as one fits."""
    while True:
        best: tuple[float, Key, int] | None = None
        for key, choices in units.items():
            here = choices[chosen[key]]
            for i, choice in enumerate(choices):
                saved = here.divergence - choice.divergence
                if choice.bits - here.bits <= rest and saved > 0 and (best is None or saved > best[0]):
                    best = saved, key, i
        if best is None:
            return
        _, key, i = best
        rest -= units[key][i].bits - units[key][chosen[key]].bits
        chosen[key] = i
