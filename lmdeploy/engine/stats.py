"""What can be read off a running engine: gauges of now and totals since its start.

Numbers only; knows nothing of how they are shown.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

# What keeps a waiting request waiting.
Bound = Literal["max_batch_size", "kv_blocks", "prefill_budget", "long_lane"]


@dataclass(slots=True)
class Totals:
    """Counts since the engine was made."""

    steps: int = 0
    prompt_tokens: int = 0  # of admitted requests
    computed_tokens: int = 0  # new tokens in all batches, recomputed ones too
    generated_tokens: int = 0
    drafted_tokens: int = 0  # computed because they might come next
    accepted_tokens: int = 0  # those of them that did
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache at first admission
    preemptions: int = 0
    resumed_tokens: int = 0  # tokens that a preempted sequence found again instead of recomputing
    shared_blocks: int = 0  # blocks taken up while another sequence held them
    awaited_prefixes: int = 0  # prefixes taken up after waiting for the sequence that was computing them
    finished: int = 0  # ended with "stop" or "length"
    aborted: int = 0
    failed: int = 0  # ended with "error" after admission to the queue
    refused: int = 0  # ended with "error" at once


@dataclass(frozen=True, slots=True)
class StepStats:
    """The engine between two steps; blocks_free + blocks_held + blocks_cached = blocks_total."""

    running: int
    waiting: int
    blocks_total: int
    blocks_free: int
    blocks_held: int
    blocks_cached: int
    unused_tokens: int = 0  # places in held blocks that no token has taken yet
    long_running: int = 0  # of `running`, in the lane of long prompts; the next two alike
    long_waiting: int = 0
    long_blocks: int = 0  # distinct ones of blocks_held
    totals: Totals = field(default_factory=Totals)


@dataclass(slots=True)
class StepNotes:
    """What the latest step tells those who measure it."""

    tokens: int = 0  # computed in it, drafts included
    bound: Bound | None = None  # None: nobody waits
    started: tuple[str, ...] = ()  # requests that began to be computed in it
