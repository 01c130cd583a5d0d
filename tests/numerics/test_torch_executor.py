"""The torch executor at its edges: memory, damaged weights, types of matrices, devices; and its sampler."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from executors import make_torch
from live_tensors import LiveTensors
from native_case import (
    NewTokens,
    make_batch,
    make_executor,
    relative_rms,
    samples,
    sequence_logits,
    with_tensor,
)
from native_llama import WHOLE_GROUPS, expected_logits, gemma2, llama, quantized, qwen3

from lmdeploy.engine.executor import Executor
from lmdeploy.errors import ConfigError, EngineError, ModelError
from lmdeploy.pytorch import device
from lmdeploy.pytorch.plan import torch_plan
from lmdeploy.pytorch.sampling import empty_result, sample_row

IDS = np.random.default_rng(3).integers(0, 130, 300).astype(np.int32)
BLOCKS = np.arange(19, dtype=np.int32)
MODELS = {
    "untied": lambda: llama(vocab_size=1000),
    "tied with biases": lambda: llama(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "quantised": lambda: quantized(llama(**WHOLE_GROUPS), lambda n: ("int8", 32) if "proj" in n else None),
    "wide feed-forward": lambda: llama(intermediate_size=4000),
    "post norms, soft caps": lambda: gemma2(vocab_size=3000),
    "head norms": qwen3,
}


@pytest.mark.parametrize(
    ("dtype", "bits"), [("float32", 16), ("bfloat16", 16), ("float32", 8), ("float32", 4)]
)
@pytest.mark.parametrize("name", MODELS)
def test_memory_taken_is_memory_planned(name: str, dtype: str, bits: int) -> None:
    """Weights and cache to the byte; what a step takes is at most what is planned, and most of it."""
    _, spec, tensors = MODELS[name]()
    executor = make_torch(spec, tensors, dtype=dtype, num_blocks=20, kv_bits=bits)
    plan = torch_plan(spec, dtype, "cpu", 16, bits)
    assert sum(x.nbytes for x in executor.weights.values()) == plan.weights
    assert sum(x.nbytes for x in executor.cache.tensors()) == 20 * plan.block
    known = [*executor.weights.values(), *executor.cache.tensors()]
    with LiveTensors(known) as live:
        executor.execute(make_batch([NewTokens(IDS, 0, BLOCKS)], samples([299], temperature=1.0)))
    drawing = 6 * 8 * spec.vocab_size  # in NumPy
    assert 0.4 * plan.workspace < live.peak + drawing <= plan.workspace


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 3e-2), ("float16", 5e-3)])
def test_types_of_matrices(dtype: str, tolerance: float) -> None:
    model, spec, tensors = llama()
    executor = make_torch(spec, tensors, dtype=dtype)
    assert relative_rms(sequence_logits(executor, IDS[:80]), expected_logits(model, IDS[:80])) < tolerance


def test_dequantising_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    _, spec, tensors = quantized(llama(**WHOLE_GROUPS), lambda n: ("int8", 32) if "proj" in n else None)
    with caplog.at_level(logging.INFO, "lmdeploy"):
        make_torch(spec, tensors)
    assert caplog.messages == ["14 quantised tensors are dequantised to float32 and kept so"]


@pytest.mark.parametrize("name", ["embed.weight", "layers.1.ffn.up_proj.weight", "norm.weight"])
def test_damaged_weights_are_refused_by_name(name: str) -> None:
    _, spec, tensors = llama()
    bad = np.array(tensors[name])
    bad.flat[3] = np.nan
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        make_torch(spec, with_tensor(tensors, name, bad))


def test_values_that_the_type_cannot_hold_are_refused() -> None:
    _, spec, tensors = llama()
    large = np.array(tensors["embed.weight"]) * np.float32(1e6)
    with pytest.raises(ModelError, match=r"embed\.weight.*float16.*another dtype"):
        make_torch(spec, with_tensor(tensors, "embed.weight", large), dtype="float16")


def test_capabilities_and_close() -> None:
    _, spec, tensors = llama()
    executor: Executor = make_torch(spec, tensors, num_blocks=7)
    caps = executor.capabilities()
    assert (caps.block_size, caps.num_blocks, caps.max_rows, caps.max_step_tokens) == (16, 7, 40, 600)
    assert (caps.vocab_size, caps.max_logprobs) == (130, 130)
    executor.close()
    with pytest.raises(EngineError, match="closed"):
        executor.execute(make_batch([NewTokens(IDS[:3], 0, BLOCKS)], samples([2])))


def test_a_card_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"device_type=cuda: torch .* install a torch that fits the driver"):
        device.open_device("cuda", 1)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("you tried to allocate memory")]
)
def test_a_full_device_is_a_memory_error(error: Exception) -> None:
    with pytest.raises(MemoryError), device.out_of_memory_is_memory_error():
        raise error


COLUMNS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "plain": {"temperature": 1.0},
    "hot, top_k": {"temperature": 1.7, "top_k": 40},
    "top_p": {"temperature": 0.9, "top_p": 0.85},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "all": {"temperature": 0.8, "top_k": 60, "top_p": 0.95, "min_p": 0.02},
    "penalties": {
        "temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2
    },
}  # fmt: skip


@pytest.mark.parametrize("name", COLUMNS)
def test_equal_logits_give_the_tokens_of_the_native_sampler(name: str) -> None:
    """The native engine's logits and draws come from its bindings; the same rows are drawn from here."""
    random, count = np.random.default_rng(1), 64
    _, spec, tensors = llama(vocab_size=3000)
    native = make_executor(spec, tensors)
    history = [{int(i): int(i) % 3 for i in random.choice(3000, 30, replace=False)} for _ in range(count)]
    bias = [{int(i): float(random.normal()) for i in random.choice(3000, 5)} for _ in range(count)]
    if name == "penalties":
        COLUMNS[name] |= {"history": history, "bias": bias}
    ids = random.integers(0, 3000, count).astype(np.int32)
    for round_ in range(3):
        columns = samples(
            range(count),
            seed=random.integers(0, 2**63, count).astype(np.uint64) * np.uint64(2) + np.uint64(1),
            position=random.integers(0, 2**40, count),
            logprobs=np.arange(count) % 21 - 1,
            target_ids=np.where(np.arange(count) % 9 == round_, 5, -1),
            want_logits=True,
            **COLUMNS[name],
        )
        batch = make_batch([NewTokens(ids, 0, np.arange(4, dtype=np.int32))], columns)
        wanted = native.execute(batch)
        got = empty_result(columns)
        for i in range(count):
            sample_row(wanted.logits[i], batch, i, got)
        assert got.token_ids.tolist() == wanted.token_ids.tolist()
        assert got.finite.all()
        assert (got.top_ids == wanted.top_ids).all()
        np.testing.assert_allclose(got.logprob, wanted.logprob, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(got.top_logprobs, wanted.top_logprobs, rtol=1e-6, atol=1e-6)
