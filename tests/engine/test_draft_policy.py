"""How many drafts are taken: what that costs where none is right, and what it gains where they are."""

from __future__ import annotations

import random

import pytest
from engine_cases import request

from lmdeploy.engine.draft_policy import AdaptivePolicy, StepCosts
from lmdeploy.engine.request import Sequence
from lmdeploy.engine.speculation import Lead
from lmdeploy.engine.step_cost import StepCost

FIRST = StepCost((1, 4, 16), (1.0, 1.3, 4.0))


def play(
    rate: float, steps: int, rows: int, row_cost: float, most: int = 8, seed: int = 0
) -> tuple[float, int]:
    """(time, tokens) of steps in which a draft is right with probability `rate`; a plain one takes 1."""
    policy, chance = AdaptivePolicy(1, most, FIRST), random.Random(seed)
    seqs = [Sequence(request(f"r{i}", [1, 2]), i) for i in range(rows)]
    time, tokens = 0.0, 0
    for _ in range(steps):
        leads = [Lead(seq, 0) for seq in seqs]
        lengths = policy.lengths(leads, rows) if policy.ready(rows) else [0] * rows
        seconds = 1 + row_cost * sum(lengths)
        policy.measure(rows, sum(lengths), max(lengths), 0.0, seconds)
        time, tokens = time + seconds, tokens + rows
        for lead, length in zip(leads, lengths, strict=True):
            accepted = 0
            while accepted < length and chance.random() < rate:
                accepted += 1
            tokens += accepted
            if length:
                policy.settle(lead, length, accepted)
    return time, tokens


@pytest.mark.parametrize("row_cost", [0.02, 0.1, 0.35, 1.0])
@pytest.mark.parametrize("rows", [1, 4, 32])
def test_useless_drafts_cost_less_than_five_percent(rows: int, row_cost: float) -> None:
    time, tokens = play(0.0, 256, rows, row_cost)
    assert time / (tokens / rows) < 1.05


@pytest.mark.parametrize("rate", [0.02, 0.05, 0.1, 0.2])
def test_rarely_right_drafts_cost_less_than_five_percent(rate: float) -> None:
    for seed in range(5):
        time, tokens = play(rate, 512, 1, 0.35, seed=seed)
        assert time / tokens < 1.05


def test_right_drafts_are_taken_as_far_as_they_pay() -> None:
    time, tokens = play(1.0, 400, 1, 0.1)
    assert tokens / time > 0.9 * 9 / 1.8
    time, tokens = play(0.8, 2000, 1, 0.3)
    best = max(sum(0.8**i for i in range(k + 1)) / (1 + 0.3 * k) for k in range(9))
    assert tokens / time > 0.9 * best


def test_many_rows_that_compute_leave_no_room_for_drafts() -> None:
    """Where each row costs its share, only drafts that are nearly always right pay."""
    time, tokens = play(0.5, 512, 32, 1 / 32)
    assert time / (tokens / 32) < 1.05


def test_it_tries_again_now_and_then() -> None:
    policy = AdaptivePolicy(1, 8, FIRST)
    lead = Lead(Sequence(request("a", [1, 2]), 0), 0)
    for useful in (False, True):
        speeds = []
        for _ in range(200):
            length = policy.lengths([lead], 1)[0] if policy.ready(1) else 0
            policy.measure(1, length, length, 0.0, 1 + 0.2 * length)
            if length:
                policy.settle(lead, length, length if useful else 0)
            speeds.append((1 + length * useful) / (1 + 0.2 * length))
        assert (sum(speeds[-50:]) / 50 > 2) == useful


def test_dear_searching_is_paid_from_the_same_account() -> None:
    policy = AdaptivePolicy(1, 8, FIRST)
    searched = 0
    for _ in range(500):
        searched += policy.ready(1)
        policy.measure(1, 0, 0, 0.5 if policy._account > 0 else 0.0, 1.0)
    assert searched * 0.5 < 0.05 * 500 + 1


def test_costs_between_measurements_lie_on_a_line_and_beyond_follow_the_first_guess() -> None:
    costs = StepCosts(StepCost((1, 2), (1.0, 2.0)))
    assert costs.relative(2, 2) == [1.0, 1.5, 2.0]
    for seconds in (9.0, 2.0, 2.0):
        costs.measure(2, 0, seconds)
    costs.measure(2, 4, 4.0)
    assert costs.relative(2, 6) == pytest.approx([1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0])
    assert costs.relative(2, 1) == pytest.approx([1.0, 1.25])
