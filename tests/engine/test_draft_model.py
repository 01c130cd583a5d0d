"""A second fake executor as draft model: how it catches up, what it keeps, what its failures cost."""

from __future__ import annotations

from typing import Any

import pytest
from draft_guesses import Guesses, Wavering
from engine_cases import drain, request, tokens

from lmdeploy.engine.draft_model import DraftModel
from lmdeploy.engine.draft_policy import AdaptivePolicy
from lmdeploy.engine.fake import FakeExecutor
from lmdeploy.engine.loop import Engine
from lmdeploy.engine.speculation import Speculation
from lmdeploy.errors import EngineError


def speculating(draft: FakeExecutor, most: int = 4, **executor: Any) -> tuple[Engine, DraftModel]:
    model = DraftModel(draft, enable_prefix_caching=True, vocab_size=1000)
    policy = Guesses(lambda request: [], most)
    return Engine(FakeExecutor(**({"block_size": 4} | executor)), None, Speculation(model, policy)), model


def plain(*asked: Any) -> dict[str, list[int]]:
    engine = Engine(FakeExecutor(block_size=4))
    for one in asked:
        engine.add(one)
    return {name: tokens(events) for name, events in drain(engine).items()}


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 0.8, "seed": 3}, {"presence_penalty": 0.5}, {"logit_bias": ((3, -2.0),)}]
)
def test_a_draft_model_that_thinks_the_same_is_always_right(fields: dict[str, Any]) -> None:
    asked = request("a", [1, 2, 3], 26, **fields)
    engine, _ = speculating(FakeExecutor(rewrites=True, block_size=4))
    engine.add(asked)
    assert tokens(drain(engine)["a"]) == plain(asked)["a"]
    totals = engine.stats().totals
    assert totals.accepted_tokens == totals.drafted_tokens > 0
    assert totals.steps == 1 + 25 // 5


def test_wrong_drafts_are_dropped_and_right_ones_not_computed_again() -> None:
    computed = 0

    def count(batch: Any) -> None:
        nonlocal computed
        computed += batch.num_tokens

    asked = request("a", list(range(9)), 60, presence_penalty=0.5)
    engine, model = speculating(Wavering(rewrites=True, block_size=4, on_step=count))
    engine.add(asked)
    assert tokens(drain(engine)["a"]) == plain(asked)["a"]
    totals = engine.stats().totals
    assert 0 < totals.accepted_tokens < totals.drafted_tokens
    # Each real token is computed once; beside them only drafts, of each proposal all but the last.
    assert computed <= 9 + 60 + totals.drafted_tokens
    assert model.cache.pool.num_held == 0


def test_prompts_of_equal_beginning_are_read_once() -> None:
    seen: list[int] = []
    draft = FakeExecutor(rewrites=True, block_size=4, on_step=lambda batch: seen.append(batch.num_tokens))
    engine, _ = speculating(draft)
    for name in "ab":
        engine.add(request(name, range(40), 6))
        drain(engine)
    assert max(seen) == seen[0] == 41
    assert sorted(seen)[-2] <= 5


def test_a_long_prompt_is_read_in_steps_of_the_draft_model() -> None:
    seen: list[int] = []
    draft = FakeExecutor(4, max_step_tokens=16, rewrites=True, on_step=lambda b: seen.append(b.num_tokens))
    engine, _ = speculating(draft)
    asked = request("a", range(100), 40)
    engine.add(asked)
    assert tokens(drain(engine)["a"]) == plain(asked)["a"]
    assert max(seen) == 16
    assert engine.stats().totals.accepted_tokens > 20


def test_without_room_in_its_cache_there_are_no_drafts() -> None:
    asked = [request(name, [number, 2, 3, 4], 30) for number, name in enumerate("ab")]
    engine, model = speculating(FakeExecutor(rewrites=True, block_size=4, num_blocks=9))
    for one in asked:
        engine.add(one)
    assert {name: tokens(events) for name, events in drain(engine).items()} == plain(*asked)
    assert engine.stats().totals.drafted_tokens > 0
    assert model.cache.pool.num_held == 0


def test_a_failing_draft_model_costs_drafts_only() -> None:
    def fail(batch: Any) -> None:
        raise EngineError("broken")

    asked = request("a", [1, 2, 3], 20)
    engine, _ = speculating(FakeExecutor(rewrites=True, block_size=4, on_step=fail))
    engine.add(asked)
    assert tokens(drain(engine)["a"]) == plain(asked)["a"]
    assert engine.stats().totals.drafted_tokens == 0


def test_numbers_that_are_not_finite_in_the_draft_model_cost_drafts_only() -> None:
    asked = request("a", [1, 2, 3], 20)
    engine, _ = speculating(FakeExecutor(rewrites=True, block_size=4, poison_id=2))
    engine.add(asked)
    assert tokens(drain(engine)["a"]) == plain(asked)["a"]
    assert engine.stats().totals.drafted_tokens == 0


def test_a_slow_useless_draft_model_is_left_alone() -> None:
    """Drafting one token takes half a step and computing it a tenth; the virtual clock adds it up."""
    now = 0.0

    def spend(seconds: float) -> None:
        nonlocal now
        now += seconds

    target = FakeExecutor(block_size=4, num_blocks=400, on_step=lambda b: spend(0.9 + 0.1 * b.num_tokens))
    draft = FakeExecutor(
        rewrites=True, block_size=4, num_blocks=400, script=(999,) * 400, on_step=lambda b: spend(0.5)
    )
    model = DraftModel(draft, enable_prefix_caching=True, vocab_size=1000)
    engine = Engine(target, None, Speculation(model, AdaptivePolicy(1, 4), lambda: now))
    engine.add(request("a", [1, 2, 3], 400))
    drain(engine)
    assert engine.stats().totals.accepted_tokens < 5
    assert now < 1.05 * 400
