"""Batch invariance of the whole engine on each executor, bit for bit in logits.

A sequence alone is compared with itself in a batch of 33, with its prompt cut into chunks, with the prefix
cache on and off, after preemption, and with other numbers of threads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from demo_model import demo_gguf
from executors import engine_config
from small_llama import save_small_llama

from lmdeploy.engine.loop import Engine
from lmdeploy.engine.request import Request, SamplingParams
from lmdeploy.runtime.build import build_engine
from lmdeploy.runtime.resolve import resolve

NEW_TOKENS = 12
rng = np.random.default_rng(7)
PROMPT = rng.integers(100, 40_000, 150).astype(np.int32)
OTHERS = [rng.integers(100, 40_000, int(n)).astype(np.int32) for n in rng.integers(1, 120, 32)]
SAMPLING = SamplingParams(temperature=0.8, top_p=0.95, seed=42)


@dataclass
class Maker:
    """Engines of one executor on one model: the torch one is slow, so its model is small."""

    executor: str
    model: Path
    options: dict[str, Any]

    def __call__(self, **fields: Any) -> Engine:
        options = dict(session_len=512, max_batch_size=40, num_threads=2, cache_block_seq_len=32)
        config = engine_config(self.executor, **{**options, **self.options, **fields})
        return build_engine(resolve(str(self.model), config))


CASES: list[tuple[str, dict[str, Any]]] = [
    *[("turbomind", {"quant_policy": policy}) for policy in (0, 8, 4)],
    *[("turbomind", {"accuracy": accuracy}) for accuracy in ("auto", "fast")],  # the others are exact
    *[("pytorch", {"quant_policy": policy}) for policy in (0, 4)],
]


@pytest.fixture(scope="module", params=CASES, ids=lambda x: f"{x[0]} {x[1]}")
def make_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Maker:
    executor, options = request.param
    if executor == "turbomind":
        return Maker(executor, demo_gguf(), options)
    return Maker(executor, save_small_llama(tmp_path_factory.mktemp("small")), options)


def main_request(name: str = "main") -> Request:
    return Request(name, PROMPT, max_new_tokens=NEW_TOKENS, sampling=SAMPLING, want_logits=True)


def run(engine: Engine, requests: list[Request], name: str = "main") -> tuple[list[int], np.ndarray]:
    for request in requests:
        engine.add(request)
    tokens: list[int] = []
    logits: list[np.ndarray] = []
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            if event.request_id == name:
                tokens += event.token_ids
                if event.logits is not None:
                    logits += list(event.logits)
    return tokens, np.array(logits)


@pytest.fixture(scope="module")
def alone(make_engine: Maker) -> tuple[list[int], np.ndarray]:
    tokens, logits = run(make_engine(enable_prefix_caching=False), [main_request()])
    assert len(tokens) == NEW_TOKENS and len(logits) == NEW_TOKENS and np.isfinite(logits).all()
    return tokens, logits


def assert_same(got: tuple[list[int], np.ndarray], wanted: tuple[list[int], np.ndarray]) -> None:
    assert got[0] == wanted[0]
    assert got[1].tobytes() == wanted[1].tobytes()


def test_inside_a_batch_of_33(make_engine: Maker, alone: tuple[list[int], np.ndarray]) -> None:
    others = [Request(f"other-{i}", ids, max_new_tokens=10 + i % 7) for i, ids in enumerate(OTHERS)]
    assert_same(run(make_engine(), [*others[:16], main_request(), *others[16:]]), alone)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prompt_cut_into_chunks(make_engine: Maker, alone: tuple[list[int], np.ndarray], chunk: int) -> None:
    engine = make_engine(max_prefill_token_num=chunk, max_batch_size=1)
    assert_same(run(engine, [main_request()]), alone)


@pytest.mark.parametrize("threads", [1, 3])
def test_number_of_threads(make_engine: Maker, alone: tuple[list[int], np.ndarray], threads: int) -> None:
    assert_same(run(make_engine(num_threads=threads), [main_request()]), alone)


def test_prefix_cache_hit(make_engine: Maker, alone: tuple[list[int], np.ndarray]) -> None:
    engine = make_engine(enable_prefix_caching=True)
    run(engine, [replace(main_request("warm"), want_logits=False)], "warm")
    before = engine.stats().totals.cached_tokens
    assert_same(run(engine, [main_request()]), alone)
    assert engine.stats().totals.cached_tokens - before >= 128


def test_after_preemption(make_engine: Maker, alone: tuple[list[int], np.ndarray]) -> None:
    """Of 12 blocks the older request comes to need 8 and the main one 6, so the younger gives way."""
    engine = make_engine(max_batch_size=2, session_len=192)
    assert engine.executor.capabilities().num_blocks == 12
    older = Request("older", np.resize(OTHERS[0], 188), max_new_tokens=40)
    assert_same(run(engine, [older, main_request()]), alone)
    totals = engine.stats().totals
    assert totals.preemptions > 0 and totals.resumed_tokens > 0
