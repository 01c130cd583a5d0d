"""Token-level ends and the bans before min_new_tokens."""

from __future__ import annotations

import numpy as np
import pytest
from engine_cases import request, run, tokens

from lmdeploy.engine.request import Request, SamplingParams, Sequence
from lmdeploy.engine.stopping import REPETITION_WINDOW, finish_reason, update_bias


@pytest.mark.parametrize(
    ("output", "capacity", "reason"),
    [
        ([1], 100, None),
        ([1, 9], 100, "stop"),
        ([1, 2, 3, 4], 100, "length"),
        ([1, 2, 3, 9], 100, "stop"),
        ([1, 2], 4, "length"),
        ([9], 100, None),  # before min_new_tokens: not an end even if an executor should draw it
    ],
)
def test_ends(output: list[int], capacity: int, reason: str | None) -> None:
    seq = Sequence(request("a", [5, 5], 4, stop_ids=frozenset({9}), min_new_tokens=1), 1)
    for token in output:
        seq.append_token(token)
    assert finish_reason(seq, capacity) == reason


def test_stop_ids_are_banned_until_enough_tokens_exist() -> None:
    seq = Sequence(request("a", [1], stop_ids=frozenset({4, 3}), min_new_tokens=2, logit_bias=((8, 1.0),)), 1)
    update_bias(seq, 100)
    assert seq.bias is not None
    assert [part.tolist() for part in seq.bias] == [[8, 3, 4], [1.0, -np.inf, -np.inf]]
    for token in (1, 2):
        seq.append_token(token)
        update_bias(seq, 100)
    assert [part.tolist() for part in seq.bias] == [[8], [1.0]]


def test_generation_goes_on_past_a_banned_stop_id() -> None:
    free = tokens(run(request("a", [1, 2], 12))["a"])
    stop = frozenset({free[2]})
    stopped = run(request("a", [1, 2], 12, stop_ids=stop))["a"]
    assert tokens(stopped) == free[:3]
    assert (stopped[-1].finish_reason, stopped[-1].stop_id) == ("stop", free[2])
    banned = run(request("a", [1, 2], 12, stop_ids=stop, min_new_tokens=12))["a"]
    assert len(tokens(banned)) == 12
    assert free[2] not in tokens(banned)
    assert banned[-1].finish_reason == "length"


def test_only_allowed_ids_are_drawn() -> None:
    sampling = SamplingParams(allowed_ids=(3, 5, 9), logit_bias=((3, 2.0), (9, -np.inf), (4, 7.0)))
    seq = Sequence(Request("a", np.array([1], np.int32), 4, sampling, frozenset({5}), min_new_tokens=1), 1)
    update_bias(seq, 12)
    assert seq.bias is not None
    values = dict(zip(*(part.tolist() for part in seq.bias), strict=True))
    assert len(values) == 12
    assert {i: x for i, x in values.items() if x != -np.inf} == {3: 2.0}
    seq.append_token(3)
    update_bias(seq, 12)
    values = dict(zip(*(part.tolist() for part in seq.bias), strict=True))
    assert {i: x for i, x in values.items() if x != -np.inf} == {3: 2.0, 5: 0.0}
    wanted = SamplingParams(allowed_ids=(4, 500))
    drawn = tokens(run(Request("b", np.array([1, 2], np.int32), 30, wanted))["b"])
    assert set(drawn) == {4, 500}


@pytest.mark.parametrize(
    ("output", "rule", "ends"),
    [
        ([1, 2, 3, 1, 2, 3], (3, 2), True),
        ([1, 2, 3, 1, 2], (3, 2), False),
        ([1, 2, 9, 1, 2, 8, 1, 2], (2, 3), True),  # at any places
        ([1, 2, 9, 1, 2, 8, 1, 2, 4], (2, 3), False),  # only the last ones count
        ([7, 7, 7], (2, 2), True),  # places may overlap
        ([7, 7], (2, 2), False),
        ([7], (1, 1), True),
    ],
)
def test_an_answer_that_repeats_itself_ends(output: list[int], rule: tuple[int, int], ends: bool) -> None:
    seq = Sequence(Request("a", np.array([1, 2, 3], np.int32), 2000, repetition=rule), 1)
    for token in output:
        seq.append_token(token)
    assert finish_reason(seq, 10_000) == ("stop" if ends else None)


def test_repetition_looks_back_so_many_tokens() -> None:
    def ended(between: int) -> bool:
        seq = Sequence(Request("a", np.array([1], np.int32), 5000, repetition=(2, 2)), 1)
        for token in [1, 2, *range(10, 10 + between), 1, 2]:
            seq.append_token(token)
        return finish_reason(seq, 10_000) is not None

    assert ended(REPETITION_WINDOW - 4)
    assert not ended(REPETITION_WINDOW - 3)
