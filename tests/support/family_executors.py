"""Every way to compute a model's logits, for the family tests: one row of `EXECUTORS` each.

A row is all that a further executor needs to run the same tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from native_case import BLOCK, NewTokens, make_batch, relative_rms, samples

from lmdeploy.engine.executor import Executor, Limits
from lmdeploy.models.checkpoint import Checkpoint
from lmdeploy.models.reference import Past, Reference
from lmdeploy.models.spec import ModelSpec
from lmdeploy.pytorch.executor import TorchConfig, TorchExecutor
from lmdeploy.turbomind.executor import NativeConfig, TurbomindExecutor

Ids = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]


class Computes(Protocol):
    def __call__(self, ids: Ids, steps: Sequence[int]) -> Logits:
        """Logits [sum(steps), vocab] of the tokens of one new sequence; a step computes so many of them."""


@dataclass(frozen=True)
class ExecutorCase:
    """error: of given and wanted logits, a number that must stay below `tolerance`."""

    make: Callable[[Checkpoint, ModelSpec], Computes]
    error: Callable[[Logits, Logits], float]
    tolerance: float


def reference(checkpoint: Checkpoint, spec: ModelSpec) -> Computes:
    model = Reference(checkpoint, spec)

    def compute(ids: Ids, steps: Sequence[int]) -> Logits:
        past: Past = []
        ends = np.cumsum(steps)
        return np.concatenate([model.logits(part, past) for part in np.split(ids[: ends[-1]], ends[:-1])])

    return compute


LIMITS = Limits(max_rows=8, max_step_tokens=256, max_context=512, block_size=BLOCK, num_threads=2)
BLOCKS = 32


def native(checkpoint: Checkpoint, spec: ModelSpec) -> Computes:
    return by_batches(TurbomindExecutor(NativeConfig(LIMITS, BLOCKS), spec, checkpoint))


def pytorch(checkpoint: Checkpoint, spec: ModelSpec) -> Computes:
    return by_batches(TorchExecutor(TorchConfig(LIMITS, BLOCKS, "cpu", "float32"), spec, checkpoint))


def by_batches(executor: Executor) -> Computes:
    blocks = np.arange(BLOCKS, dtype=np.int32)

    def compute(ids: Ids, steps: Sequence[int]) -> Logits:
        rows, begin = [], 0
        for count in steps:
            columns = samples(range(count), want_logits=True)
            new = NewTokens(ids[begin : begin + count], begin, blocks)
            result = executor.execute(make_batch([new], columns))
            rows += [result.logits[i] for i in range(count)]
            begin += count
        return np.array(rows)

    return compute


def largest(got: Any, wanted: Any) -> float:
    """Of the differences, against the largest value (at least 1)."""
    return float(np.abs(got - wanted).max() / max(1.0, np.abs(wanted).max()))


# turbomind: activations keep 14 to 16 bits, keys and values are fp16 (see test_native_model.py).
EXECUTORS: dict[str, ExecutorCase] = {
    "reference": ExecutorCase(reference, largest, 1e-4),
    "turbomind": ExecutorCase(native, relative_rms, 2e-3),
    "pytorch": ExecutorCase(pytorch, largest, 1e-4),
}
