"""Small models for the native executor: a checkpoint in memory, batches, and logits of whole sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from lmdeploy.engine.batch import Batch, SampleColumns
from lmdeploy.engine.executor import Limits
from lmdeploy.models.checkpoint import TensorInfo
from lmdeploy.models.spec import ModelSpec
from lmdeploy.quant.tensors import GroupedTensor, Tensor
from lmdeploy.turbomind.executor import NativeConfig, TurbomindExecutor

BLOCK = 16


@dataclass
class MemoryCheckpoint:
    """The Checkpoint contract over arrays; counts what was read."""

    spec: ModelSpec
    tensors: Mapping[str, Tensor]
    reads: int = 0
    packed: None = None

    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def info(self, name: str) -> TensorInfo:
        tensor = self.tensors[name]
        if not isinstance(tensor, GroupedTensor):
            return TensorInfo(tensor.shape, str(tensor.dtype), 8 * tensor.dtype.itemsize, 0, tensor.nbytes)
        kind = "int8" if tensor.bits == 8 else "int4_min" if tensor.mins is not None else "int4_zero"
        return TensorInfo(tensor.shape, kind, tensor.bits, tensor.group_size, tensor.codes.nbytes)

    def read(self, name: str) -> Tensor:
        self.reads += 1
        return self.tensors[name]

    def called(self, name: str) -> str:
        return f"memory: tensor {name!r}"

    def stored_matrix(self, name: str) -> None:
        return None

    def release(self, name: str) -> None:
        pass

    def close(self) -> None:
        pass


def make_executor(
    spec: ModelSpec,
    tensors: Mapping[str, Tensor],
    threads: int = 2,
    accuracy: str = "exact",
    dtype: str = "auto",
    **fields: int,
) -> Any:
    values = dict(max_rows=40, max_step_tokens=600, max_context=2048, block_size=BLOCK, num_threads=threads)
    num_blocks = fields.pop("num_blocks", 160)
    config = NativeConfig(Limits(**{**values, **fields}), num_blocks, accuracy, dtype)  # type: ignore[arg-type]
    return TurbomindExecutor(config, spec, MemoryCheckpoint(spec, tensors))  # type: ignore[arg-type]


def bf16(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Rounded to bfloat16, as float32."""
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def samples(token_index: Sequence[int], **columns: Any) -> SampleColumns:
    """Greedy samples at the given tokens; any column may be replaced by an array or one value for all."""
    count = len(token_index)

    def column(name: str, default: Any, dtype: Any) -> npt.NDArray[Any]:
        return np.broadcast_to(np.asarray(columns.pop(name, default), dtype), (count,)).copy()

    bias = columns.pop("bias", [{}] * count)
    history = columns.pop("history", [{}] * count)

    def ragged(rows: Sequence[Mapping[int, Any]], dtype: Any) -> tuple[Any, Any, Any]:
        start = np.cumsum([0, *map(len, rows)]).astype(np.int32)
        ids = [i for row in rows for i in row]
        values = [v for row in rows for v in row.values()]
        return start, np.array(ids, np.int32), np.array(values, dtype)

    result = SampleColumns(
        np.asarray(token_index, np.int32),
        column("target_ids", -1, np.int32),
        column("temperature", 0, np.float32),
        column("top_k", 0, np.int32),
        column("top_p", 1, np.float32),
        column("min_p", 0, np.float32),
        column("repetition_penalty", 1, np.float32),
        column("presence_penalty", 0, np.float32),
        column("frequency_penalty", 0, np.float32),
        column("seed", 0, np.uint64),
        column("position", 0, np.int64),
        column("logprobs", -1, np.int32),
        *ragged(bias, np.float32),
        *ragged(history, np.int32),
        column("want_logits", False, np.bool_),
    )
    assert not columns, f"unknown columns {columns}"
    return result


@dataclass
class NewTokens:
    """New tokens of one sequence and where its cache lies."""

    ids: npt.NDArray[np.int32]
    context: int
    blocks: npt.NDArray[np.int32]


def make_batch(rows: Sequence[NewTokens], columns: SampleColumns) -> Batch:
    starts = np.cumsum([0, *(len(r.ids) for r in rows)]).astype(np.int32)
    needed = [r.blocks[: -(-(r.context + len(r.ids)) // BLOCK)] for r in rows]
    return Batch(
        np.concatenate([r.ids for r in rows]).astype(np.int32),
        starts,
        np.array([r.context for r in rows], np.int32),
        np.cumsum([0, *map(len, needed)]).astype(np.int32),
        np.concatenate(needed).astype(np.int32),
        columns,
    )


def sequence_logits(
    executor: TurbomindExecutor,
    ids: npt.NDArray[np.int32],
    blocks: npt.NDArray[np.int32] | None = None,
    chunk: int = 10**6,
) -> npt.NDArray[np.float32]:
    """Raw logits of every position, [len(ids), vocab], computed `chunk` tokens at a time."""
    if blocks is None:
        blocks = np.arange(-(-len(ids) // BLOCK), dtype=np.int32)
    rows = []
    for begin in range(0, len(ids), chunk):
        part = ids[begin : begin + chunk]
        columns = samples(range(len(part)), want_logits=True)
        result = executor.execute(make_batch([NewTokens(part, begin, blocks)], columns))
        assert result.finite.all()
        rows += [result.logits[i] for i in range(len(part))]
    return np.array(rows)


def relative_rms(got: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> float:
    """Root mean square of the difference, over that of the wanted values about their mean."""
    return float(np.sqrt(np.mean((got - wanted) ** 2)) / wanted.std())


def quantize(values: npt.NDArray[np.float32], kind: str, group: int) -> GroupedTensor:
    """A plain rounding to `kind` (int8, int4_zero, int4_min); for tests only."""
    n, k = values.shape
    x = values.reshape(n, -1, group)
    low, high = x.min(-1), x.max(-1)
    if kind == "int8":
        scales = (np.abs(x).max(-1) / 127).astype(np.float16)
        codes = np.rint(x / scales[..., None].astype(np.float32)).clip(-127, 127).astype(np.int8)
        return GroupedTensor(8, group, codes.reshape(n, k), scales)
    scales = ((high - low) / 15).astype(np.float16)
    wide = scales[..., None].astype(np.float32)
    if kind == "int4_min":
        mins = low.astype(np.float16)
        codes = np.rint((x - mins[..., None].astype(np.float32)) / wide).clip(0, 15).astype(np.uint8)
        return GroupedTensor(4, group, codes.reshape(n, k), scales, mins=mins)
    zeros = np.rint(-low / scales.astype(np.float32)).clip(0, 15).astype(np.uint8)
    codes = (np.rint(x / wide) + zeros[..., None]).clip(0, 15).astype(np.uint8)
    return GroupedTensor(4, group, codes.reshape(n, k), scales, zeros=zeros)


def with_tensor(tensors: Mapping[str, Tensor], name: str, value: Tensor) -> dict[str, Tensor]:
    assert name in tensors
    return {**tensors, name: value}
