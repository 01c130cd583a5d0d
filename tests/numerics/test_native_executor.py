"""The native executor at its edges: planned against taken memory, damaged weights, batches to refuse."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from executors import EXECUTORS
from executors import make_executor as make_any
from native_case import (
    MemoryCheckpoint,
    NewTokens,
    make_batch,
    make_executor,
    samples,
    sequence_logits,
    with_tensor,
)
from native_llama import WHOLE_GROUPS, Case, gemma2, llama, quantized, qwen3

from lmdeploy.engine.executor import Executor, Limits
from lmdeploy.errors import EngineError, ModelError
from lmdeploy.quant.tensors import GroupedTensor
from lmdeploy.turbomind.plan import native_plan

IDS = np.arange(20, dtype=np.int32)
BLOCKS = np.arange(2, dtype=np.int32)


def every_kind(name: str) -> tuple[str, int] | None:
    if "q_proj" in name or "up_proj" in name:
        return "int4_min", 32
    if "o_proj" in name:
        return "int4_zero", 32
    return ("int8", 32) if "proj" in name or "head" in name else None


def with_dtype(case: Case, dtype: Any) -> Case:
    model, spec, tensors = case
    return model, spec, {n: np.asarray(t).astype(dtype) for n, t in tensors.items()}


MODELS = {
    "untied": llama,
    "tied with biases": lambda: llama(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "quantised": lambda: quantized(llama(**WHOLE_GROUPS), every_kind),
    "float16": lambda: with_dtype(llama(), np.float16),
    "post norms": gemma2,
    "head norms": qwen3,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("threads", "bits"), [(1, 16), (3, 16), (1, 8), (2, 4)])
def test_memory_taken_is_memory_planned(name: str, threads: int, bits: int) -> None:
    _, spec, tensors = MODELS[name]()
    limits = Limits(5, 77, 3000, 16, threads, bits)
    checkpoint = MemoryCheckpoint(spec, tensors)
    plan = native_plan(spec, {n: checkpoint.info(n) for n in tensors}, limits)
    assert checkpoint.reads == 0
    fields = {"max_rows": 5, "max_step_tokens": 77, "max_context": 3000, "num_blocks": 9, "kv_bits": bits}
    model = make_executor(spec, tensors, threads, **fields)._model
    assert model.weight_bytes_used == plan.weights
    assert model.workspace_bytes == plan.workspace
    assert model.cache_bytes == 9 * plan.block


def test_capabilities() -> None:
    _, spec, tensors = llama()
    executor: Executor = make_executor(spec, tensors, num_blocks=7)
    caps = executor.capabilities()
    assert (caps.block_size, caps.num_blocks, caps.max_rows, caps.max_step_tokens) == (16, 7, 40, 600)
    assert (caps.vocab_size, caps.max_logprobs) == (130, 130)


BAD: dict[str, Any] = {
    "dense": lambda t: np.where(np.arange(t.shape[1]) == 3, np.nan, t).astype(np.float32),
    "overflowing": lambda t: np.where(np.arange(t.shape[1]) == 3, 3.4e38, t).astype(np.float32),
    "bfloat16": lambda t: np.where(np.arange(t.shape[1]) == 3, np.inf, t).astype(ml_dtypes.bfloat16),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("name", ["embed.weight", "layers.1.ffn.up_proj.weight", "lm_head.weight"])
def test_damaged_matrix_is_refused_by_name(kind: str, name: str) -> None:
    _, spec, tensors = llama()
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        make_executor(spec, with_tensor(tensors, name, BAD[kind](tensors[name])))


@pytest.mark.parametrize("field", ["scales", "mins"])
def test_damaged_scales_are_refused_by_name(field: str) -> None:
    _, spec, tensors = quantized(llama(**WHOLE_GROUPS), lambda n: ("int4_min", 32) if "k_proj" in n else None)
    name = "layers.0.attn.k_proj.weight"
    tensor = tensors[name]
    assert isinstance(tensor, GroupedTensor)
    values = np.array(getattr(tensor, field))
    values[1, 2] = np.inf
    with pytest.raises(ModelError, match=r"layers\.0\.attn\.k_proj\.weight"):
        make_executor(spec, with_tensor(tensors, name, replace(tensor, **{field: values})))


def test_damaged_norm_is_refused_by_name() -> None:
    _, spec, tensors = llama()
    norm = np.array(tensors["norm.weight"])
    norm[0] = np.nan
    with pytest.raises(ModelError, match=r"norm\.weight"):
        make_executor(spec, with_tensor(tensors, "norm.weight", norm))


def test_rounding_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    _, spec, tensors = llama()
    with caplog.at_level(logging.INFO, "lmdeploy"):
        make_executor(spec, tensors)  # float32, but exact in bfloat16
        assert caplog.messages == []
        exact = np.array(tensors["embed.weight"]) + np.float32(1e-4)
        make_executor(spec, with_tensor(tensors, "embed.weight", exact))
    assert len(caplog.messages) == 1
    assert "embed.weight" in caplog.messages[0]


def batch(**changes: Any) -> Any:
    whole = make_batch([NewTokens(IDS, 0, BLOCKS)], samples([19]))
    columns = {k: v for k, v in changes.items() if hasattr(whole.samples, k)}
    fields = {k: v for k, v in changes.items() if k not in columns}
    return replace(whole, samples=replace(whole.samples, **columns), **fields)


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


def floats(*values: float) -> Any:
    return np.array(values, np.float32)


REFUSED: dict[str, dict[str, Any]] = {
    "token outside the vocabulary": {"token_ids": np.full(20, 130, np.int32)},
    "negative token": {"token_ids": np.full(20, -1, np.int32)},
    "block outside the cache": {"block_ids": ints(0, 160)},
    "negative block": {"block_ids": ints(0, -1)},
    "too few blocks": {"block_ids": ints(0), "block_start": ints(0, 1)},
    "offsets that fall": {"row_start": ints(0, 25)},
    "missing offset": {"row_start": ints(0)},
    "empty row": {"row_start": ints(0, 0, 20), "context_len": ints(0, 0), "block_start": ints(0, 1, 2)},
    "negative context": {"context_len": ints(-1)},
    "context without blocks": {"context_len": ints(13)},
    "sample outside the batch": {"token_index": ints(20)},
    "target outside the vocabulary": {"target_ids": ints(130)},
    "column of another length": {"top_k": ints(0, 0)},
    "column of another type": {"top_p": np.ones(1, np.float64)},
    "bias outside the vocabulary": {
        "bias_ids": ints(130), "bias_values": floats(1), "bias_start": ints(0, 1)
    },
    "infinite bias": {"bias_ids": ints(1), "bias_values": floats(np.inf), "bias_start": ints(0, 1)},
    "history outside the vocabulary": {
        "history_ids": ints(-2), "history_counts": ints(1), "history_start": ints(0, 1)
    },
    "bias offsets past the end": {"bias_start": ints(0, 1)},
    "temperature that is not a number": {"temperature": floats(np.nan)},
    "negative temperature": {"temperature": floats(-1)},
    "top_p of zero": {"top_p": floats(0)},
    "min_p above one": {"min_p": floats(1.5)},
    "repetition of zero": {"repetition_penalty": floats(0)},
    "infinite penalty": {"presence_penalty": floats(np.inf)},
}  # fmt: skip


@pytest.fixture(scope="module", params=EXECUTORS)
def executor(request: pytest.FixtureRequest) -> Any:
    _, spec, tensors = llama()
    return make_any(request.param, spec, tensors)


@pytest.mark.parametrize("name", REFUSED)
def test_bad_batch_is_refused_and_the_next_one_works(executor: Any, name: str) -> None:
    good = executor.execute(batch(want_logits=np.array([True]))).logits[0]
    with pytest.raises(EngineError):
        executor.execute(batch(**REFUSED[name]))
    assert executor.execute(batch(want_logits=np.array([True]))).logits[0].tobytes() == good.tobytes()


def test_too_many_rows_or_tokens(executor: Any) -> None:
    rows = [NewTokens(IDS[:1], 0, BLOCKS)] * 41
    with pytest.raises(EngineError, match="max_rows"):
        executor.execute(make_batch(rows, samples([])))
    long = NewTokens(np.zeros(601, np.int32), 0, np.arange(38, dtype=np.int32))
    with pytest.raises(EngineError, match="max_step_tokens"):
        executor.execute(make_batch([long], samples([])))


def test_a_step_without_samples(executor: Any) -> None:
    result = executor.execute(make_batch([NewTokens(IDS, 0, BLOCKS)], samples([])))
    assert result.token_ids.shape == (0,)
    assert result.top_ids.shape == (0, 0)


def test_closed_executor_refuses() -> None:
    _, spec, tensors = llama()
    executor = make_executor(spec, tensors)
    executor.close()
    with pytest.raises(EngineError, match="closed"):
        executor.execute(batch())


def test_works_in_a_child_after_fork() -> None:
    _, spec, tensors = llama()
    executor = make_executor(spec, tensors, threads=3)
    wanted = sequence_logits(executor, IDS)
    child = os.fork()
    if child == 0:
        os._exit(0 if sequence_logits(executor, IDS).tobytes() == wanted.tobytes() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sequence_logits(executor, IDS).tobytes() == wanted.tobytes()
