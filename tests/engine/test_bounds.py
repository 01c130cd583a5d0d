"""What the engine says keeps requests waiting: one case for each limit."""

from __future__ import annotations

import numpy as np
import pytest

from lmdeploy.engine.fake import FakeExecutor
from lmdeploy.engine.loop import Engine, EngineOptions
from lmdeploy.engine.request import Request


def engine(prompts: list[int], options: EngineOptions, **executor: int) -> Engine:
    """An engine with one request for each prompt length, no two alike."""
    made = Engine(FakeExecutor(**executor), options)
    for number, length in enumerate(prompts):
        ids = np.arange(length, dtype=np.int32) + 100 * number
        made.add(Request(f"r{number}", ids, max_new_tokens=20))
    return made


@pytest.mark.parametrize(
    ("bound", "prompts", "options", "executor"),
    [
        (None, [10, 10], {}, {}),
        ("max_batch_size", [10, 10, 10], {"max_batch_size": 2}, {}),
        ("prefill_budget", [60, 60], {"max_prefill_token_num": 32}, {}),
        ("kv_blocks", [60, 60], {}, {"num_blocks": 6}),
    ],
)
def test_bound(
    bound: str | None, prompts: list[int], options: dict[str, int], executor: dict[str, int]
) -> None:
    made = engine(prompts, EngineOptions(**options), **executor)
    made.step()
    assert made.notes.bound == bound


def test_each_request_starts_once_also_when_it_was_preempted() -> None:
    made = engine([30, 30], EngineOptions(), num_blocks=5)
    started = []
    for _ in range(100):
        if made.has_work:
            made.step()
            started += made.notes.started
    assert made.stats().totals.preemptions > 0
    assert started == ["r0", "r1"]


def test_unused_places_are_those_of_blocks_without_tokens() -> None:
    made = engine([20], EngineOptions(), block_size=16)
    made.step()
    # 20 prompt tokens in two blocks of 16.
    assert made.stats().unused_tokens == 12
