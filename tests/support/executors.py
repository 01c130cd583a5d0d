"""Each executor by name, for tests that run unchanged on all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from native_case import MemoryCheckpoint
from native_case import make_executor as make_native

from lmdeploy import PytorchEngineConfig, TurbomindEngineConfig
from lmdeploy.config import EngineConfig
from lmdeploy.engine.executor import Limits
from lmdeploy.models.spec import ModelSpec
from lmdeploy.quant.tensors import Tensor

EXECUTORS = ("turbomind", "pytorch")


def engine_config(executor: str, **fields: Any) -> EngineConfig:
    """The options that both engines take, for one of them; both at their most exact unless said otherwise."""
    if executor == "pytorch":
        return PytorchEngineConfig(device_type="cpu", **fields)
    return TurbomindEngineConfig(**{"accuracy": "exact", **fields})


def make_executor(
    executor: str,
    spec: ModelSpec,
    tensors: Mapping[str, Tensor],
    threads: int | None = None,
    **fields: int,
) -> Any:
    """One on the CPU, in its own default type, with the limits of `native_case.make_executor`."""
    if executor == "pytorch":
        return make_torch(spec, tensors, threads or 1, **fields)
    return make_native(spec, tensors, threads or 2, **fields)


def make_torch(
    spec: ModelSpec,
    tensors: Mapping[str, Tensor],
    threads: int = 1,
    dtype: str = "float32",
    **fields: int,
) -> Any:
    from lmdeploy.pytorch.executor import TorchConfig, TorchExecutor

    limits = dict(max_rows=40, max_step_tokens=600, max_context=2048, block_size=16, num_threads=threads)
    num_blocks = fields.pop("num_blocks", 160)
    config = TorchConfig(Limits(**{**limits, **fields}), num_blocks, "cpu", dtype)
    return TorchExecutor(config, spec, MemoryCheckpoint(spec, tensors))  # type: ignore[arg-type]


def fill_cache(executor: Any, value: float) -> None:
    """Every key and value of the cache becomes `value`, as a fault would leave it."""
    if hasattr(executor, "_model"):
        # As bits of bfloat16, in which scales and offsets are.
        executor._model.fill_cache(int(np.float32(value).view(np.uint32)) >> 16)
        return
    for tensor in executor.cache.tensors():
        tensor.fill_(value if tensor.is_floating_point() else 255)
