"""A long prompt on the native engine: its pieces do not show in the ids, the cache wastes next to nothing."""

from __future__ import annotations

import numpy as np
import pytest
from native_case import make_executor
from native_llama import llama

from lmdeploy.engine.loop import Engine
from lmdeploy.engine.request import Request
from lmdeploy.engine.scheduler import EngineOptions

TOKENS = 8000
NEW_TOKENS = 8
IDS = np.random.default_rng(5).integers(0, 130, TOKENS).astype(np.int32)


def answer(bits: int, chunk: int) -> tuple[list[int], np.ndarray, float]:
    """Ids, logits, and the share of allocated slots that is not used at the end."""
    _, spec, tensors = llama(max_position_embeddings=16384)
    fields = {"max_step_tokens": chunk + 1, "max_context": 8192, "num_blocks": 512, "kv_bits": bits}
    engine = Engine(
        make_executor(spec, tensors, **fields), EngineOptions(max_batch_size=1, max_prefill_token_num=chunk)
    )
    engine.add(Request("long", IDS, max_new_tokens=NEW_TOKENS, want_logits=True))
    ids: list[int] = []
    logits: list[np.ndarray] = []
    waste = 1.0
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            ids += event.token_ids
            logits += [] if event.logits is None else list(event.logits)
        if held := 16 * engine.stats().blocks_held:
            waste = 1 - (TOKENS + len(ids) - 1) / held
    return ids, np.array(logits), waste


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_in_pieces_as_in_one(bits: int) -> None:
    whole, pieces = answer(bits, TOKENS), answer(bits, 500)
    assert len(whole[0]) == NEW_TOKENS
    assert whole[0] == pieces[0]
    assert whole[1].tobytes() == pieces[1].tobytes()
    assert 0 <= whole[2] < 0.01
