"""Refuses a batch that breaks the contract, before anything is computed from it.

An id or offset out of place would read or overwrite another sequence's blocks.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from lmdeploy.engine.batch import Batch, Masks, SampleColumns
from lmdeploy.engine.executor import Capabilities
from lmdeploy.errors import EngineError

Array = npt.NDArray[np.generic]
_DTYPES = {"I32": np.int32, "I64": np.int64, "U64": np.uint64, "F32": np.float32}
_RAGGED = {"bias_start", "bias_ids", "bias_values", "history_start", "history_ids", "history_counts"}


def check_batch(batch: Batch, caps: Capabilities) -> None:
    """Raise EngineError naming what is wrong."""
    rows, size = batch.num_rows, caps.block_size
    _offsets("row_start", batch.row_start, rows, len(batch.token_ids))
    _offsets("block_start", batch.block_start, rows, len(batch.block_ids))
    if rows > caps.max_rows:
        raise _wrong(f"{rows} rows; max_rows is {caps.max_rows}")
    if batch.num_tokens > caps.max_step_tokens:
        raise _wrong(f"{batch.num_tokens} tokens; max_step_tokens is {caps.max_step_tokens}")
    counts = np.diff(batch.row_start)
    if (counts < 1).any() or (batch.context_len < 0).any():
        raise _wrong("a row without tokens or with a negative context")
    if (np.diff(batch.block_start) * size < batch.context_len + counts).any():
        raise _wrong("a row has fewer blocks than its tokens need")
    _within("token_ids", batch.token_ids, caps.vocab_size)
    _within("block_ids", batch.block_ids, caps.num_blocks)
    _check_samples(batch.samples, batch.num_tokens, caps.vocab_size)
    if batch.masks is not None:
        _check_masks(batch.masks, len(batch.samples.token_index), caps.vocab_size)


def _check_masks(masks: Masks, count: int, vocab_size: int) -> None:
    if len(masks.index) != count or masks.bits.shape[1] != -(-vocab_size // 32):
        raise _wrong("masks must have one index per sample and one bit per token")
    _within("mask index", masks.index + 1, len(masks.bits) + 1)


def _check_samples(s: SampleColumns, num_tokens: int, vocab_size: int) -> None:
    count = len(s.token_index)
    for field in dataclasses.fields(s):
        column, dtype = getattr(s, field.name), _DTYPES.get(str(field.type), np.bool_)
        if column.dtype != dtype:
            raise _wrong(f"{field.name} must be of type {np.dtype(dtype).name}")
        if field.name not in _RAGGED and len(column) != count:
            raise _wrong(f"{field.name} must have one entry per sample")
    _within("token_index", s.token_index, num_tokens)
    if (np.diff(s.token_index) < 0).any():
        raise _wrong("token_index must ascend")
    if (s.target_ids < -1).any() or (s.target_ids >= vocab_size).any():
        raise _wrong("target_ids is out of range")
    _offsets("bias_start", s.bias_start, count, len(s.bias_ids))
    _offsets("history_start", s.history_start, count, len(s.history_ids))
    _within("bias_ids", s.bias_ids, vocab_size)
    _within("history_ids", s.history_ids, vocab_size)
    _check_numbers(s)


def _check_numbers(s: SampleColumns) -> None:
    """Each comparison is false for NaN."""
    good = {
        "temperature": (s.temperature >= 0) & (s.temperature < np.inf),
        "top_k": s.top_k >= 0,
        "top_p": (s.top_p > 0) & (s.top_p <= 1),
        "min_p": (s.min_p >= 0) & (s.min_p <= 1),
        "repetition_penalty": (s.repetition_penalty > 0) & (s.repetition_penalty < np.inf),
        "presence_penalty": np.isfinite(s.presence_penalty),
        "frequency_penalty": np.isfinite(s.frequency_penalty),
        "bias_values": s.bias_values < np.inf,
    }
    for name, fits in good.items():
        if not fits.all():
            raise _wrong(f"{name} is out of range")


def _offsets(name: str, offsets: Array, count: int, total: int) -> None:
    values = offsets.astype(np.int64)
    if len(values) != count + 1 or values[0] != 0 or values[-1] != total or (np.diff(values) < 0).any():
        raise _wrong(f"{name} must be {count + 1} offsets that ascend from 0 to {total}")


def _within(name: str, ids: Array, limit: int) -> None:
    values = ids.astype(np.int64)
    if (values < 0).any() or (values >= limit).any():
        raise _wrong(f"{name} is outside of 0 to {limit - 1}")


def _wrong(what: str) -> EngineError:
    return EngineError(f"the batch cannot be computed: {what}")
