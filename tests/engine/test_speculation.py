"""Steps with drafts over the fake executor: what is told, what is banned, what room drafts may take."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from draft_guesses import Guesses
from engine_cases import drain, request, tokens

from lmdeploy.engine.draft_policy import AdaptivePolicy
from lmdeploy.engine.fake import FakeExecutor
from lmdeploy.engine.loop import Engine, EngineOptions
from lmdeploy.engine.prompt_lookup import PromptLookup
from lmdeploy.engine.request import Request, TokenEvent
from lmdeploy.engine.speculation import Speculation


def plain(request: Request, **executor: Any) -> list[TokenEvent]:
    engine = Engine(FakeExecutor(**({"block_size": 4} | executor)))
    engine.add(request)
    return drain(engine)[request.request_id]


def guessing(most: int = 5, options: EngineOptions | None = None, **executor: Any) -> Engine:
    guesses = Guesses(lambda request: tokens(plain(request)), most)
    return Engine(FakeExecutor(**({"block_size": 4} | executor)), options, Speculation(guesses, guesses))


def speculated(request: Request, **more: Any) -> list[TokenEvent]:
    engine = guessing(**more)
    engine.add(request)
    return drain(engine)[request.request_id]


def test_one_event_tells_of_several_tokens_and_all_that_was_asked_of_each() -> None:
    asked = request("a", [1, 2, 3], 20, logprobs=2, want_logits=True, presence_penalty=0.5)
    want, got = plain(asked), speculated(asked)
    assert tokens(got) == tokens(want)
    assert len(got) < len(want)
    assert all(e.accepted_tokens == len(e.token_ids) - 1 for e in got)
    assert sum(e.drafted_tokens for e in got) > sum(e.accepted_tokens for e in got)
    assert all(len(e.token_ids) == len(e.logprobs) == len(e.logits) for e in got if e.logits is not None)
    assert [x for e in got for x in e.logprobs] == [x for e in want for x in e.logprobs]
    logits = [np.concatenate([e.logits for e in events if e.logits is not None]) for events in (got, want)]
    assert (logits[0] == logits[1]).all()


@pytest.mark.parametrize("min_new_tokens", [1, 2, 4, 5, 7])
@pytest.mark.parametrize("later", [0, 1, 2, 3])
def test_stop_ids_are_banned_for_drafts_just_as_long(min_new_tokens: int, later: int) -> None:
    free = tokens(plain(request("a", [1, 2, 3], 16)))
    stop = frozenset({free[min_new_tokens - 1 + later]})
    asked = request("a", [1, 2, 3], 16, stop_ids=stop, min_new_tokens=min_new_tokens)
    want, got = plain(asked), speculated(asked)
    assert tokens(got) == tokens(want)
    assert (got[-1].finish_reason, got[-1].stop_id) == (want[-1].finish_reason, want[-1].stop_id)


def test_what_comes_behind_a_stop_is_dropped() -> None:
    free = tokens(plain(request("a", [1, 2, 3], 16)))
    got = speculated(request("a", [1, 2, 3], 16, stop_ids=frozenset({free[9]})))
    assert tokens(got) == free[: free.index(free[9]) + 1]
    assert got[-1].finish_reason == "stop"


def test_no_draft_behind_the_last_token() -> None:
    engine = guessing(8)
    seen = 0

    def look(batch: Any) -> None:
        nonlocal seen
        seen = max(seen, int(batch.context_len[0]) + batch.num_tokens)

    engine.executor.on_step = look  # type: ignore[attr-defined]
    engine.add(request("a", [1, 2, 3], 12))
    assert len(tokens(drain(engine)["a"])) == 12
    assert seen <= 3 + 12 - 1


def test_a_draft_takes_no_block_that_another_sequence_may_need() -> None:
    """Both requests fit exactly; with drafts that took blocks freely one of them would be preempted."""
    asked = [request(name, [number, 2, 3], 10) for number, name in enumerate("ab")]
    engine = guessing(7, num_blocks=6)
    for one in asked:
        engine.add(one)
    events = drain(engine)
    assert engine.stats().totals.preemptions == 0
    for one in asked:
        assert tokens(events[one.request_id]) == tokens(plain(one, num_blocks=6))
    assert engine.stats().blocks_held == 0


def test_steps_that_compute_prompts_have_no_drafts() -> None:
    engine = guessing(5, EngineOptions(max_prefill_token_num=4))
    engine.add(request("a", [1, 2, 3], 30))
    engine.step()
    engine.add(request("b", list(range(40)), 1))
    while "b" in engine._live:
        before = engine.stats().totals.drafted_tokens
        engine.step()
        assert engine.stats().totals.drafted_tokens == before
    drain(engine)
    assert engine.stats().totals.drafted_tokens > 0


def test_an_abort_between_steps_frees_what_drafts_held() -> None:
    engine = guessing(5)
    engine.add(request("a", [1, 2, 3], 30))
    for _ in range(4):
        engine.step()
    engine.abort("a")
    assert engine.stats().blocks_held == 0
    assert drain(engine)["a"][-1].finish_reason == "abort"


def test_repeated_text_takes_fewer_steps_by_prompt_lookup() -> None:
    script = tuple(range(5, 13)) * 8
    lookup = PromptLookup(2, 5)
    engine = Engine(
        FakeExecutor(4, script=script), None, Speculation(lookup, AdaptivePolicy(lookup.num_kinds, 8))
    )
    engine.add(request("a", range(5, 13), 60))
    assert tuple(tokens(drain(engine)["a"])) == script[:60]
    assert engine.stats().totals.steps < 20


def test_a_step_that_fails_ends_its_requests_alone() -> None:
    from lmdeploy.errors import EngineError

    engine = guessing(5)
    engine.add(request("a", [1, 2, 3], 30))
    engine.step()

    def fail(batch: Any) -> None:
        raise EngineError("broken")

    engine.executor.on_step = fail  # type: ignore[attr-defined]
    assert [e.error for e in engine.step()] == ["broken"]
    engine.executor.on_step = None  # type: ignore[attr-defined]
    engine.add(request("b", [1, 2, 3], 8))
    assert tokens(drain(engine)["b"]) == tokens(plain(request("b", [1, 2, 3], 8)))
