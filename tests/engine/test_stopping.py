"""Token-level ends and the bans before min_new_tokens."""

from __future__ import annotations

import numpy as np
import pytest
from engine_cases import request, run, tokens

from lmdeploy.engine.request import Sequence
from lmdeploy.engine.stopping import finish_reason, update_bias


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
    update_bias(seq)
    assert seq.bias is not None
    assert [part.tolist() for part in seq.bias] == [[8, 3, 4], [1.0, -np.inf, -np.inf]]
    for token in (1, 2):
        seq.append_token(token)
        update_bias(seq)
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
