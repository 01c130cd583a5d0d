"""The memory account holds: the engine process takes what the plan says, and no more later.

The engine runs in its own process, as under the server. Every block of the cache is used, then resident
memory is compared with the plan; then other prompts follow, and it must not grow.
"""

from __future__ import annotations

import numpy as np
import pytest
from demo_model import demo_gguf

from lmdeploy import TurbomindEngineConfig
from lmdeploy.engine.request import Request
from lmdeploy.runtime.client import ProcessClient
from lmdeploy.runtime.machine import resident_bytes
from lmdeploy.runtime.messages import Recipe
from lmdeploy.runtime.resolve import RuntimeConfig, resolve

TOLERANCE = 0.05
GROWTH = 4 << 20  # bytes: what the allocator may keep of one more round of the same size
NEW_TOKENS = 8


async def use_every_block(client: ProcessClient, config: RuntimeConfig, round: int) -> None:
    """Full-length requests with prompts that share nothing, as many as the pool holds at once."""
    random = np.random.default_rng(round)
    length = config.session_len - NEW_TOKENS
    requests = [
        Request(f"{round}-{i}", random.integers(1000, 40000, length, np.int32), max_new_tokens=NEW_TOKENS)
        for i in range(config.plan.sequences)
    ]
    async for event in await client.submit(*requests):
        assert event.finish_reason in (None, "length")


@pytest.mark.parametrize(("session_len", "max_batch_size"), [(256, 2), (512, 8)])
async def test_resident_memory_is_the_plan(session_len: int, max_batch_size: int) -> None:
    wanted = TurbomindEngineConfig(session_len=session_len, max_batch_size=max_batch_size)
    config = resolve(str(demo_gguf()), wanted)
    client = ProcessClient(Recipe.of("lmdeploy.runtime.build:build_engine", config))
    await client.start()
    try:
        assert client.pid is not None
        # A finished sequence leaves its full blocks in the prefix cache: the second round takes the others.
        for round in range(2):
            await use_every_block(client, config, round)
        loaded = resident_bytes(client.pid)
        assert abs(loaded / config.plan.total - 1) <= TOLERANCE, (loaded, config.plan)
        await use_every_block(client, config, 2)
        assert resident_bytes(client.pid) <= loaded + GROWTH
        stats = await client.stats()
        assert stats["blocks_held"] == 0
        assert stats["blocks_free"] + stats["blocks_cached"] == config.plan.num_blocks
    finally:
        await client.close()


def test_another_limit_is_another_pool() -> None:
    small = resolve(str(demo_gguf()), TurbomindEngineConfig(session_len=256, max_batch_size=2)).plan
    large = resolve(str(demo_gguf()), TurbomindEngineConfig(session_len=512, max_batch_size=4)).plan
    assert large.kv_pool == 4 * small.kv_pool
    # 30 layers, 3 KV heads, keys and values: 64 codes of 16 bits and a scale of as many.
    assert small.kv_pool == 2 * 256 * (30 * 3 * 2 * (64 + 1) * 2)
