"""The seam between deciding and computing.

An executor computes one `Batch` at a time and remembers nothing between steps but weights and cache blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lmdeploy.engine.batch import Batch, StepResult


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the engine must know of an executor; all in tokens, rows or blocks."""

    block_size: int  # tokens a cache block holds
    num_blocks: int
    max_step_tokens: int  # largest Batch.num_tokens
    max_rows: int  # largest Batch.num_rows
    vocab_size: int
    max_logprobs: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What an executor is built for: the most a step may hold, the size of a cache block, compute threads."""

    max_rows: int
    max_step_tokens: int
    max_context: int  # tokens of the longest sequence that is planned for; longer ones work too
    block_size: int  # tokens
    num_threads: int
    kv_bits: int = 16  # of a key or value in the cache: 8, 4, or 16 for what the executor keeps without loss


class Executor(Protocol):
    """Implemented by the native engine, the torch engine, fakes and simulators."""

    def capabilities(self) -> Capabilities: ...

    def execute(self, batch: Batch) -> StepResult:
        """Compute one step: write the new tokens' keys and values, then draw or score each sample."""
        ...

    def close(self) -> None:
        """Free weights and cache; further calls are errors."""
        ...
