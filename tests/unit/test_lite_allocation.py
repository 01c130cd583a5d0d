"""Bits shared out among units, against every possible choice."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lmdeploy.lite.allocation import Choice, allocate


def units(seed: int, count: int = 6) -> dict[int, list[Choice]]:
    rng = np.random.default_rng(seed)
    result = {}
    for key in range(count):
        size, worst = rng.integers(10, 60), float(rng.lognormal(0, 1.5))
        bits = np.array([4.16, 4.31, 4.62, 8.16]) * size
        result[key] = [
            Choice(float(b), worst * f * float(rng.uniform(0.8, 1.2)))
            for b, f in zip(bits, (1, 0.8, 0.6, 0.01), strict=True)
        ]
    return result


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("share", [0.02, 0.1, 0.3, 0.7, 0.97, 1.5])
def test_close_to_the_best_of_all(seed: int, share: float) -> None:
    given = units(seed)
    low, high = (sum(choices[i].bits for choices in given.values()) for i in (0, -1))
    budget = low + share * (high - low)
    found = allocate(given, budget)
    best = min(
        sum(given[k][i].divergence for k, i in enumerate(chosen))
        for chosen in itertools.product(range(4), repeat=len(given))
        if sum(given[k][i].bits for k, i in enumerate(chosen)) <= budget
    )
    assert found.bits <= budget
    assert found.divergence == pytest.approx(sum(given[k][i].divergence for k, i in found.chosen.items()))
    assert found.bound <= best * (1 + 1e-9) <= found.divergence * (1 + 1e-9)
    largest = max(choices[0].divergence for choices in given.values())
    assert found.divergence - found.bound <= largest  # of no more than one unit


def test_many_units_come_within_a_thousandth_of_the_bound() -> None:
    given = units(1, 400)
    low = sum(choices[0].bits for choices in given.values())
    found = allocate(given, low * 1.2)
    assert found.divergence <= found.bound * 1.001


def test_too_few_bits() -> None:
    with pytest.raises(ValueError, match="at least"):
        allocate({0: [Choice(100, 1.0)]}, 99)
