"""Order, budget, preemption, and requests that do not fit."""

from __future__ import annotations

import numpy as np
from engine_cases import drain, engine, request, run, tokens

from lmdeploy.engine.batch import Batch
from lmdeploy.engine.fake import FakeExecutor
from lmdeploy.engine.loop import Engine, EngineOptions


def recorded(options: EngineOptions, **executor: int) -> tuple[Engine, list[list[int]]]:
    """An engine and the new tokens of each row of each step to come."""
    steps: list[list[int]] = []

    def note(batch: Batch) -> None:
        steps.append(np.diff(batch.row_start).tolist())

    return Engine(FakeExecutor(4, on_step=note, **executor), options), steps


def test_a_long_prompt_is_cut_and_mixed_into_decode_steps() -> None:
    eng, steps = recorded(EngineOptions(max_prefill_token_num=8))
    eng.add(request("stream", [1, 2, 3], 6))
    eng.step()
    eng.add(request("long", range(20), 1))
    drain(eng)
    assert steps == [[3], [1, 8], [1, 8], [1, 4], [1], [1]]


def test_a_step_never_exceeds_what_the_executor_takes() -> None:
    eng, steps = recorded(EngineOptions(max_batch_size=8), max_step_tokens=6, max_rows=4)
    for i in range(8):
        eng.add(request(f"r{i}", range(10 * i, 10 * i + 9), 5))
    drain(eng)
    assert max(sum(rows) for rows in steps) == 6
    assert max(len(rows) for rows in steps) == 4


def test_first_come_first_served() -> None:
    events = run(*(request(f"r{i}", [i, 7], 3) for i in range(5)), options=EngineOptions(max_batch_size=1))
    assert list(events) == ["r0", "r1", "r2", "r3", "r4"]


def test_running_streams_move_in_every_step_while_prompts_arrive() -> None:
    eng = engine(EngineOptions(max_prefill_token_num=64), num_blocks=4096, max_step_tokens=96)
    for i in range(4):
        eng.add(request(f"stream{i}", [i, 1, 2], 300))
    for step in range(290):
        if step % 10 == 5:
            eng.add(request(f"prompt{step}", (np.arange(2000) * 7 + step * 31) % 1000, 2))
        heard = [event.request_id for event in eng.step()]
        assert [name for name in heard if name.startswith("stream")] == [f"stream{i}" for i in range(4)]
    assert eng.stats().waiting > 0, "the prompts were no load"


def test_the_youngest_is_preempted_and_resumes_from_what_is_left_of_its_prefix() -> None:
    requests = [request(f"r{i}", range(50 * i, 50 * i + 9), 14) for i in range(3)]
    eng = engine(num_blocks=14)
    for r in requests:
        eng.add(r)
    events = drain(eng)
    totals = eng.stats().totals
    assert totals.preemptions > 0
    assert totals.resumed_tokens > 0
    assert list(dict.fromkeys(e for e in events)) == ["r0", "r1", "r2"]
    for r in requests:
        assert tokens(events[r.request_id]) == tokens(run(r)[r.request_id])


def test_a_request_larger_than_the_cache_fails_alone_and_at_once() -> None:
    eng = engine(num_blocks=160, max_step_tokens=64)  # 640 tokens
    eng.add(request("large", range(1000 // 2), 4))
    eng.add(request("too large", [i % 900 for i in range(1000)], 4))
    eng.add(request("small", [1, 2, 3], 2))
    (first, *_) = eng.step()
    assert (first.request_id, first.finish_reason) == ("too large", "error")
    assert first.error is not None
    assert "1000 tokens" in first.error
    assert "640 tokens" in first.error
    events = drain(eng)
    assert [len(tokens(events[name])) for name in ("large", "small")] == [4, 2]


def test_a_prompt_that_only_just_fits_is_served() -> None:
    assert len(tokens(run(request("fits", range(31), 5), num_blocks=8)["fits"])) == 1
    assert run(request("not", range(32), 5), num_blocks=8)["not"][0].finish_reason == "error"


def test_as_many_full_sequences_as_the_cache_holds_run_at_once() -> None:
    eng = engine(num_blocks=24)
    for i in range(4):
        eng.add(request(f"r{i}", range(100 * i, 100 * i + 21), 3))
    eng.step()
    assert eng.stats().running == 4
    drain(eng)
    assert eng.stats().totals.preemptions == 0


def test_a_sequence_that_outgrows_the_empty_cache_ends_with_length() -> None:
    events = run(request("a", range(20), 500), request("b", range(30, 40), 500), num_blocks=8)
    for name, prompt in (("a", 20), ("b", 10)):
        assert events[name][-1].finish_reason == "length"
        assert len(tokens(events[name])) == 32 - prompt


def test_a_request_that_waited_for_a_prefix_is_not_starved_by_later_ones() -> None:
    # `same` waits for `owner`; later requests fill the cache meanwhile and must give way again.
    eng = engine(EngineOptions(max_prefill_token_num=4), num_blocks=12)
    shared = list(range(100, 116))
    eng.add(request("owner", shared, 12))
    eng.step()
    eng.add(request("same", [*shared, 1], 2))
    for i in range(6):
        eng.add(request(f"later{i}", [i, i, i, i, i], 20))
    events = drain(eng)
    last = list(events)
    assert last.index("same") < last.index("later5")
    assert all(e[-1].finish_reason == "length" for e in events.values())
