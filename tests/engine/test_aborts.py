"""Ten thousand requests that are given up at any moment leave nothing behind."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np

from lmdeploy.engine.fake import FakeExecutor
from lmdeploy.engine.lanes import LaneOptions
from lmdeploy.engine.loop import Engine, EngineOptions
from lmdeploy.engine.request import Request

REQUESTS, LIVE = 10_000, 24
FLAT = 100_000  # bytes of the last thousand requests that may be held after them


def test_random_aborts_leave_every_block_free() -> None:
    """Prompts share beginnings, some are long; most are aborted while they wait, read or answer."""
    draw = random.Random(7)
    engine = Engine(
        FakeExecutor(block_size=16, num_blocks=96, vocab_size=97),
        EngineOptions(max_batch_size=8, max_prefill_token_num=64, lanes=LaneOptions(100, 0.25, 0.5)),
    )
    live: list[str] = []
    try:
        for number in range(REQUESTS):
            if number == REQUESTS - 1000:
                tracemalloc.start()
            engine.add(_request(draw, number))
            live.append(f"r{number}")
            while len(live) > draw.randrange(LIVE):
                engine.abort(live.pop(draw.randrange(len(live))))
            ended = {e.request_id for e in engine.step() if e.finish_reason is not None}
            live = [name for name in live if name not in ended]
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    for name in live:
        engine.abort(name)
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_held) == (0, 0, 0)
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    assert stats.totals.aborted > REQUESTS / 2
    assert held < FLAT


def _request(draw: random.Random, number: int) -> Request:
    length = draw.choice([3, 20, 60, 60, 150, 400])
    prompt = np.arange(length, dtype=np.int32) % 90 + draw.randrange(3)
    return Request(
        f"r{number}",
        prompt,
        draw.randrange(1, 40),
        priority=draw.choice([0, 0, 1]),
        account=draw.choice(["", "a", "b"]),
        streams=draw.random() < 0.5,
    )
