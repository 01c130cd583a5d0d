"""The profile of a step: complete, within the time of the step, and without influence on the result."""

from __future__ import annotations

import time

import numpy as np
import pytest
from native_case import NewTokens, make_batch, make_executor, samples
from native_llama import gemma2, llama

from lmdeploy.engine.batch import Batch

OPERATIONS = {
    *("embed", "prepare", "qkv", "rope_store", "attention", "o", "gate_up", "activation", "down", "residual"),
    *("head", "finish", "sample", "barrier"),
}


def step(tokens: int, count: int = 1) -> Batch:
    ids = np.arange(tokens, dtype=np.int32)
    return make_batch(
        [NewTokens(ids, 0, np.arange(40, dtype=np.int32))], samples(range(tokens - count, tokens))
    )


def test_off_there_is_none() -> None:
    _, spec, tensors = llama()
    executor = make_executor(spec, tensors)
    executor.execute(step(3))
    assert executor.profile() == {}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("tokens", [1, 40])
def test_operations_fill_the_step(threads: int, tokens: int) -> None:
    _, spec, tensors = llama()
    executor = make_executor(spec, tensors, threads)
    plain = executor.execute(step(tokens))
    executor.set_profile(True)
    begin = time.perf_counter()
    measured = executor.execute(step(tokens))
    whole = time.perf_counter() - begin
    profile = executor.profile()
    assert profile.keys() == OPERATIONS
    assert 0 < sum(op.seconds for op in profile.values()) <= whole
    assert all(op.seconds > 0 and op.times > 0 for op in profile.values())
    assert measured.token_ids.tolist() == plain.token_ids.tolist()
    executor.set_profile(False)
    executor.execute(step(tokens))
    assert executor.profile() == {}


def barriers(spec: object, tensors: object, tokens: int) -> int:
    executor = make_executor(spec, tensors)  # type: ignore[arg-type]
    executor.set_profile(True)
    executor.execute(step(tokens))
    return int(executor.profile()["barrier"].times)


def test_barriers_of_a_step_are_counted() -> None:
    """Five in each layer and three about them; rows that threads share to prepare cost one more each time."""
    _, spec, tensors = llama()
    layers = len(spec.layers)
    assert barriers(spec, tensors, 1) == 5 * layers + 3
    assert barriers(spec, tensors, 40) == 8 * layers + 3
    _, spec, tensors = gemma2()
    assert barriers(spec, tensors, 1) == 7 * len(spec.layers) + 3
