"""A sequence's logits are the same bits however it is batched, cut, threaded and placed in the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from executors import EXECUTORS, fill_cache, make_executor
from native_case import BLOCK, NewTokens, make_batch, samples, sequence_logits
from native_llama import WHOLE_GROUPS, Case, gemma2, llama, quantized

GARBAGE = 65504.0  # the largest value of fp16
rng = np.random.default_rng(11)
LENGTH = 600  # two ranges of attention
IDS = rng.integers(0, 130, LENGTH).astype(np.int32)
BLOCKS = np.arange(-(-LENGTH // BLOCK), dtype=np.int32)


def mixed(name: str) -> tuple[str, int] | None:
    """Every kind of weight in one model."""
    kinds: dict[str, tuple[str, int]] = {
        "q_proj": ("int4_min", 32),
        "o_proj": ("int4_zero", 32),
        "gate_proj": ("int8", 32),
        "up_proj": ("int8", 32),
        "lm_head": ("int8", 96),
    }
    return kinds.get(name.split(".")[-2])


def with_float16() -> Case:
    """float16 matrices, also beside others that read the same rows."""
    model, spec, tensors = quantized(llama(**WHOLE_GROUPS), mixed)
    halves = ("k_proj.weight", "v_proj.weight", "down_proj.weight", "embed.weight")
    return model, spec, {n: t.astype(np.float16) if n.endswith(halves) else t for n, t in tensors.items()}


MODELS = {
    "bfloat16": llama,
    "quantised": lambda: quantized(llama(**WHOLE_GROUPS), mixed),
    "windows and post norms": gemma2,
}


@dataclass
class Solo:
    kind: str
    options: dict[str, Any]
    case: Case
    logits: npt.NDArray[np.float32]

    def executor(self, threads: int | None = None, **fields: int) -> Any:
        return make_executor(self.kind, self.case[1], self.case[2], threads, **self.options, **fields)


CACHES = [(model, name, {"kv_bits": bits}) for model in MODELS for name in EXECUTORS for bits in (16, 8, 4)]
PLANES = [("quantised", "turbomind", {"accuracy": accuracy}) for accuracy in ("auto", "fast")]  # else exact
PLANES += [("bfloat16", "turbomind", {"accuracy": "auto"}), ("float16", "turbomind", {})]


@pytest.fixture(scope="module", params=CACHES + PLANES, ids=lambda x: f"{x[0]} {x[1]} {x[2]}")
def solo(request: pytest.FixtureRequest) -> Solo:
    model, executor, options = request.param
    case = with_float16() if model == "float16" else MODELS[model]()
    logits = sequence_logits(make_executor(executor, case[1], case[2], **options), IDS)
    return Solo(executor, options, case, logits)


def assert_same(got: npt.NDArray[np.float32], wanted: npt.NDArray[np.float32]) -> None:
    assert got.shape == wanted.shape
    differing = np.flatnonzero((got != wanted).any(1) | np.isnan(got).any(1))
    assert differing.size == 0, f"{differing.size} positions differ, the first is {differing[0]}"


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prompt_cut_into_chunks(solo: Solo, chunk: int) -> None:
    length = LENGTH if chunk > 1 else 80
    assert_same(sequence_logits(solo.executor(), IDS[:length], chunk=chunk), solo.logits[:length])


@pytest.mark.parametrize("threads", [1, 3])
def test_number_of_threads(solo: Solo, threads: int) -> None:
    executor = solo.executor(threads)
    assert_same(sequence_logits(executor, IDS[:560], chunk=560), solo.logits[:560])
    last = [decode(executor, i) for i in range(560, LENGTH)]
    assert_same(np.array(last), solo.logits[560:])


def decode(executor: Any, position: int) -> npt.NDArray[np.float32]:
    row = NewTokens(IDS[position : position + 1], position, BLOCKS)
    result = executor.execute(make_batch([row], samples([0], want_logits=True)))
    return np.asarray(result.logits[0])


def test_longer_than_planned_for(solo: Solo) -> None:
    """max_context sizes what spreads ranges over threads; without that memory the result is the same."""
    executor = solo.executor(3, max_context=1)
    assert_same(sequence_logits(executor, IDS[:597], BLOCKS), solo.logits[:597])
    assert_same(np.array([decode(executor, i) for i in range(597, LENGTH)]), solo.logits[597:])


@pytest.mark.parametrize("place", [0, 17, 32])
def test_inside_a_batch_of_33(solo: Solo, place: int) -> None:
    """The others are chunks and single tokens of every length, and come and go."""
    executor = solo.executor(num_blocks=300)
    others = rng.permutation(np.arange(len(BLOCKS), 300)).astype(np.int32)[:256].reshape(32, 8)
    got = []
    for step in range(12):
        rows = [
            NewTokens(rng.integers(0, 130, 1 + (i * step) % 9).astype(np.int32), (i + step) % 100, blocks)
            for i, blocks in enumerate(others)
        ]
        begin = 5 * step
        rows.insert(place, NewTokens(IDS[begin : begin + 5], begin, BLOCKS))
        first = sum(len(row.ids) for row in rows[:place])
        total = sum(len(row.ids) for row in rows)
        wanted = [first <= i < first + 5 for i in range(total)]
        result = executor.execute(make_batch(rows, samples(range(total), want_logits=wanted)))
        got += [result.logits[i] for i in range(first, first + 5)]
    assert_same(np.array(got), solo.logits[:60])


@pytest.mark.parametrize("stale", [np.nan, GARBAGE])
def test_shuffled_blocks_with_stale_values(solo: Solo, stale: float) -> None:
    executor = solo.executor(num_blocks=100)
    fill_cache(executor, stale)
    blocks = rng.permutation(100).astype(np.int32)[: len(BLOCKS)]
    assert_same(sequence_logits(executor, IDS, blocks, chunk=150), solo.logits)


def test_blocks_used_by_another_sequence(solo: Solo) -> None:
    executor = solo.executor(num_blocks=len(BLOCKS))
    sequence_logits(executor, rng.integers(0, 130, LENGTH).astype(np.int32))
    assert_same(sequence_logits(executor, IDS, BLOCKS[::-1].copy(), chunk=300), solo.logits)


def test_run_to_run(solo: Solo) -> None:
    executor = solo.executor()
    for _ in range(3):
        assert_same(sequence_logits(executor, IDS[:100]), solo.logits[:100])
