"""The engine as its owner sees it: ids, events, aborts, local errors, scoring, seeds."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from engine_cases import drain, engine, request, run, tokens

from lmdeploy.engine.batch import Batch
from lmdeploy.engine.fake import FakeExecutor
from lmdeploy.engine.loop import Engine, EngineOptions
from lmdeploy.engine.request import TokenEvent
from lmdeploy.errors import EngineDeadError, EngineError, RequestError, rebuild_error


def test_an_idle_engine_has_no_work_and_computes_nothing() -> None:
    eng = engine()
    assert not eng.has_work
    assert eng.step() == []
    assert eng.stats().totals.steps == 0


def test_one_event_for_each_token_and_one_end() -> None:
    events = run(request("a", [1, 2, 3], 5))["a"]
    assert [len(e.token_ids) for e in events] == [1] * 5
    assert [e.finish_reason for e in events] == [None] * 4 + ["length"]


def test_an_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    eng = engine()
    eng.add(request("a", [1], 1))
    with pytest.raises(EngineError, match="'a' is already in use"):
        eng.add(request("a", [2], 1))
    eng.abort("a")
    with pytest.raises(EngineError, match="already in use"):
        eng.add(request("a", [2], 1))
    assert eng.step() == [TokenEvent("a", finish_reason="abort")]
    eng.add(request("a", [2], 1))
    assert len(tokens(drain(eng)["a"])) == 1


def test_abort_frees_at_once_wherever_the_request_is() -> None:
    eng = engine(EngineOptions(max_batch_size=2, max_prefill_token_num=4))
    for name in ("decoding", "chunked", "waiting"):
        eng.add(request(name, range(2) if name == "decoding" else range(30), 50))
    eng.step()
    eng.step()
    for name in ("waiting", "chunked", "decoding", "never seen"):
        eng.abort(name)
    stats = eng.stats()
    assert stats.blocks_held == stats.running == stats.waiting == 0
    assert {e.request_id: e.finish_reason for e in eng.step()} == dict.fromkeys(
        ("waiting", "chunked", "decoding"), "abort"
    )
    assert not eng.has_work
    eng.abort("decoding")
    assert not eng.has_work


def test_ten_thousand_random_aborts_leave_nothing_behind() -> None:
    choose = random.Random(5)
    eng = engine(EngineOptions(max_batch_size=6, max_prefill_token_num=8), num_blocks=24)
    live: list[str] = []
    for i in range(10_000):
        name = f"r{i}"
        prompt = [choose.randrange(3) for _ in range(choose.randrange(1, 24))]
        eng.add(request(name, prompt, 30, cache_salt=choose.choice(["", "x"])))
        live.append(name)
        if i % 4 == 0:
            eng.step()
        if len(live) > 12:
            eng.abort(live.pop(choose.randrange(len(live))))
    for name in live:
        eng.abort(name)
    stats = eng.stats()
    assert stats.blocks_free + stats.blocks_cached == 24
    assert stats.totals.aborted + stats.totals.finished == 10_000
    assert stats.totals.aborted > 9_000
    eng._cache.pool.check()
    assert not eng._cache._computing
    eng.step()
    assert not eng.has_work


def test_results_belong_to_their_requests_and_errors_stay_local() -> None:
    requests = [
        request("long", range(40), 6),
        request("short", [1], 2),
        request("too long", range(300), 2),
        request("last", [1, 2], 2),
    ]
    events = run(*requests)
    assert events["too long"][-1].finish_reason == "error"
    for r in requests:
        if r.request_id != "too long":
            assert tokens(events[r.request_id]) == tokens(run(r)[r.request_id])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": []}, "no token"),
        ({"prompt": [5, 1000]}, "outside the vocabulary of 1000"),
        ({"prompt": [-1]}, "outside the vocabulary"),
        ({"prompt": [1], "logit_bias": ((1000, 1.0),)}, "logit_bias"),
        ({"prompt": [1], "stop_ids": frozenset({1000}), "min_new_tokens": 1}, "banned stop id"),
        ({"prompt": [1], "seed": 2**64}, "64-bit"),
        ({"prompt": [1], "top_k": -1}, "top_k"),
        ({"prompt": [1], "logprobs": 21}, "more than 20"),
        ({"prompt": [1], "prompt_logprobs": 21}, "more than 20"),
        ({"prompt": range(1100)}, "does not fit the cache"),
        ({"prompt": [1], "temperature": -0.1}, "temperature"),
        ({"prompt": [1], "temperature": math.inf}, "temperature"),
        ({"prompt": [1], "temperature": 1e39}, "temperature"),
        ({"prompt": [1], "top_p": 0.0}, "top_p"),
        ({"prompt": [1], "top_p": 1e-300}, "top_p"),
        ({"prompt": [1], "min_p": math.nan}, "min_p"),
        ({"prompt": [1], "repetition_penalty": 0.0}, "repetition_penalty"),
        ({"prompt": [1], "presence_penalty": math.nan}, "presence_penalty"),
        ({"prompt": [1], "frequency_penalty": math.inf}, "frequency_penalty"),
        ({"prompt": [1], "logit_bias": ((1, math.nan),)}, "logit_bias"),
    ],
)
def test_what_no_executor_can_serve_is_refused_with_the_reason(
    fields: dict[str, object], reason: str
) -> None:
    (event,) = run(request("a", **fields))["a"]  # type: ignore[arg-type]
    assert event.finish_reason == "error"
    assert event.error is not None
    assert reason in event.error
    assert "\n" not in event.error
    assert isinstance(rebuild_error(event.error_kind, event.error), RequestError)


def test_non_finite_logits_end_only_the_request_concerned() -> None:
    requests = [request("bad", [7, 66, 7], 5), request("good", [7, 65, 7], 5)]
    events = run(*requests, poison_id=66)
    assert [e.finish_reason for e in events["bad"]] == ["error"]
    assert "NaN" in str(events["bad"][0].error)
    assert events["bad"][0].error_kind == "EngineError"
    assert tokens(events["good"]) == tokens(run(requests[1])["good"])


def failing(error: EngineError, at_step: int) -> Engine:
    steps = iter(range(1000))

    def on_step(batch: Batch) -> None:
        if next(steps) == at_step:
            raise error

    return Engine(FakeExecutor(4, 64, on_step=on_step), EngineOptions(max_batch_size=2))


def test_a_failed_batch_ends_its_requests_and_the_engine_goes_on() -> None:
    eng = failing(EngineError("the device hiccupped"), at_step=1)
    requests = [request(name, range(9), 3) for name in "abc"]
    for r in requests:
        eng.add(r)
    events = drain(eng)
    ends = {name: (e[-1].finish_reason, e[-1].error) for name, e in events.items()}
    assert ends["a"] == ends["b"] == ("error", "the device hiccupped")
    assert tokens(events["c"]) == tokens(run(requests[2])["c"])
    assert eng.stats().blocks_held == 0


def test_a_dead_executor_is_not_taken_for_a_bad_batch() -> None:
    eng = failing(EngineDeadError("gone"), at_step=0)
    eng.add(request("a", [1], 3))
    with pytest.raises(EngineDeadError):
        eng.step()


def test_a_seeded_request_does_not_depend_on_its_neighbours() -> None:
    seeded = request("A", [1, 2, 3], 10, temperature=0.8, seed=42)
    alone = tokens(run(seeded)["A"])
    for attempt in range(5):
        others = [
            request(f"n{i}", [i, attempt], 7 + i, temperature=1.0, seed=attempt * 7 + i) for i in range(7)
        ]
        assert tokens(run(*others[:attempt], seeded, *others[attempt:])["A"]) == alone
    assert tokens(run(request("A", [1, 2, 3], 10, temperature=0.8, seed=43))["A"]) != alone


def test_a_request_without_penalty_is_unmoved_by_one_with_it() -> None:
    plain = request("plain", [3] * 8, 6)
    penalised = request("penalised", [3] * 80, 6, repetition_penalty=1.1)
    together = run(penalised, plain)
    for r in (plain, penalised):
        assert tokens(together[r.request_id]) == tokens(run(r)[r.request_id])
    assert tokens(together["penalised"]) != tokens(run(request("x", [3] * 80, 6))["x"])


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_prompt_scores_come_once_in_order_with_the_first_token(chunk: int) -> None:
    options = EngineOptions(max_prefill_token_num=chunk)
    prompt = list(range(30, 41))
    first, *rest = run(request("a", prompt, 3, prompt_logprobs=2), options=options)["a"]
    assert [score.token_id for score in first.prompt_logprobs] == prompt[1:]
    assert all(len(score.top_ids) == len(score.top_logprobs) == 2 for score in first.prompt_logprobs)
    assert first.prompt_logprobs == run(request("a", prompt, 3, prompt_logprobs=2))["a"][0].prompt_logprobs
    assert all(event.prompt_logprobs == () for event in rest)


def test_scoring_never_skips_cached_positions_and_survives_preemption() -> None:
    eng = engine(EngineOptions(max_prefill_token_num=6), num_blocks=13)
    old, scored = request("old", range(24), 20), request("scored", range(24), 3, prompt_logprobs=0)
    eng.add(old)
    for _ in range(6):
        eng.step()
    eng.add(scored)
    events = drain(eng)
    assert events["scored"][0].cached_tokens == 0
    assert events["scored"] == run(scored)["scored"]


def test_scoring_alone_needs_no_new_token() -> None:
    (event,) = run(request("a", [4, 5, 6], 0, prompt_logprobs=1))["a"]
    assert event.token_ids == ()
    assert event.finish_reason == "length"
    assert [score.token_id for score in event.prompt_logprobs] == [5, 6]


def test_logprobs_and_logits_only_where_wanted() -> None:
    both = [request("with", [1, 2], 2, logprobs=3, want_logits=True), request("without", [1, 3], 2)]
    events = run(*both)
    for event in events["with"]:
        assert event.logits is not None
        assert event.logits.shape == (1, 1000)
        (entry,) = event.logprobs
        assert entry.token_id == event.token_ids[0]
        assert len(entry.top_ids) == len(entry.top_logprobs) == 3
        assert entry.logprob == event.logits[0, entry.token_id]
    assert all(e.logits is None and e.logprobs == () for e in events["without"])


def test_stats_add_up() -> None:
    eng = engine(num_blocks=10)
    eng.add(request("a", range(9), 3))
    eng.add(request("b", range(9), 3))
    eng.add(request("c", np.arange(100), 3))
    eng.step()
    stats = eng.stats()
    assert (stats.running, stats.waiting) == (1, 1)
    assert stats.blocks_total == stats.blocks_free + stats.blocks_held + stats.blocks_cached == 10
    drain(eng)
    totals = eng.stats().totals
    assert (totals.finished, totals.refused, totals.failed, totals.aborted) == (2, 1, 0, 0)
    assert (totals.prompt_tokens, totals.cached_tokens, totals.generated_tokens) == (18, 8, 6)
    assert totals.computed_tokens == 9 + 1 + 2 * 2
    assert stats.totals.finished == 0, "an earlier answer must not change"
