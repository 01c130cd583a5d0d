"""The memory account of an engine: what it takes, what fits, which limit binds.

Arithmetic on bytes and tokens only; knows no file, no machine and no engine.

    room     = free - process - weights - workspace - draft - server
    pool    <= cache_max_entry_count x room, and <= max_batch_size sequences of session_len tokens
    sequences at once = blocks of the pool // blocks of one sequence, at most max_batch_size
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lmdeploy.errors import CapacityError

# Resident memory of an engine process without weights, cache and workspace: interpreter, NumPy, libraries,
# and what reading a checkpoint leaves on the heap. Measured with CPython 3.11 and NumPy 2.4;
# tests/e2e/test_memory.py holds it to the truth.
PROCESS_BYTES = 50 * 2**20
# The same with torch 2.13: resident memory on the CPU; on a card, an allowance for its context and libraries.
TORCH_PROCESS_BYTES = {"cpu": 280 * 2**20, "cuda": 768 * 2**20}

# Memory of a web server process beside the engine's: libraries, and what the tokenizer keeps for each of its
# ids. Measured as anonymous memory on vocabularies of 32000 to 256000 ids (what files back is shared with the
# engine process and counted there); tests/e2e/test_server_demo.py holds it to the truth.
_SERVER_BYTES = 45 * 2**20
_SERVER_BYTES_PER_ID = 2048
MAX_BODIES = 32 * 2**20  # bytes of request bodies that a server holds at once
_COPIES_OF_A_BODY = 2  # as it came, and as text


def server_bytes(vocab_size: int, bodies: int = MAX_BODIES) -> int:
    """Memory of the web server process for models of `vocab_size` ids together, with `bodies` of requests."""
    return _SERVER_BYTES + _SERVER_BYTES_PER_ID * vocab_size + _COPIES_OF_A_BODY * bodies


@dataclass(frozen=True, slots=True)
class Needs:
    """What the engine takes whatever the cache's size, and what a block takes; in bytes."""

    weights: int
    workspace: int
    block: int  # all layers' keys and values of `block_size` tokens
    block_size: int  # tokens
    token: int  # keys and values of one token, all layers
    process: int = PROCESS_BYTES  # of the engine without any of these
    server: int = 0  # of a web server process beside the engine
    draft: int = 0  # weights and workspace of a draft model
    draft_block: int = 0  # what it keeps beside each block

    @property
    def both_blocks(self) -> int:
        """A block and the draft model's beside it."""
        return self.block + self.draft_block


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user asked; None: the largest session_len that fits, up to `model_len`."""

    session_len: int | None
    model_len: int
    max_batch_size: int
    share: float  # cache_max_entry_count


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes, except where a name says otherwise."""

    weights: int
    workspace: int
    process: int
    kv_pool: int
    kv_per_token: int
    num_blocks: int
    block_size: int  # tokens
    session_len: int  # tokens
    sequences: int  # of session_len tokens that fit at once, at most max_batch_size
    sequences_by_memory: int  # the same if max_batch_size were no limit
    bound: Literal["memory", "max_batch_size"]
    free: int
    free_bound: str  # what bounds `free`: "machine", the directory of a control group or the name of a card
    server: int = 0  # of the web server process beside the engine; 0: none, or the engine is on a card
    draft: int = 0  # weights, workspace and cache of a draft model

    @property
    def total(self) -> int:
        """Memory of the engine process once every block has been used, and of the server beside it."""
        return self.weights + self.workspace + self.process + self.kv_pool + self.draft + self.server


def plan_memory(needs: Needs, wishes: Wishes, free: int, free_bound: str = "machine") -> MemoryPlan:
    """Share `free` bytes out. Raises CapacityError, naming what would fit and which setting to change."""
    room = free - needs.process - needs.weights - needs.workspace - needs.draft - needs.server
    blocks = max(int(room * wishes.share), 0) // needs.both_blocks
    if blocks == 0:
        raise CapacityError(_no_room(needs, wishes, free, free_bound, room))
    session_len = wishes.session_len
    if session_len is None:
        session_len = min(wishes.model_len, blocks * needs.block_size)
    per_sequence = -(-session_len // needs.block_size)
    if per_sequence > blocks:
        raise CapacityError(_too_long(needs, wishes, blocks, room, free_bound))
    useful = per_sequence * wishes.max_batch_size
    by_memory = blocks // per_sequence
    num_blocks = min(blocks, useful)
    return MemoryPlan(
        weights=needs.weights,
        workspace=needs.workspace,
        process=needs.process,
        kv_pool=num_blocks * needs.block,
        kv_per_token=needs.token,
        num_blocks=num_blocks,
        block_size=needs.block_size,
        session_len=session_len,
        sequences=min(by_memory, wishes.max_batch_size),
        sequences_by_memory=by_memory,
        bound="max_batch_size" if useful <= blocks else "memory",
        free=free,
        free_bound=free_bound,
        server=needs.server,
        draft=needs.draft + num_blocks * needs.draft_block,
    )


def _no_room(needs: Needs, wishes: Wishes, free: int, free_bound: str, room: int) -> str:
    taken = f"weights {size(needs.weights)}, workspace {size(needs.workspace)}, process {size(needs.process)}"
    taken += f", draft model {size(needs.draft)}" if needs.draft else ""
    taken += f", server {size(needs.server)}" if needs.server else ""
    where, block = _where(free_bound), needs.both_blocks
    if room < block:
        need = free - room + block
        return (
            f"the model does not fit: {taken} and one cache block {size(block)} take {size(need)}, but "
            f"{size(free)} are free {where}; free memory, lower max_batch_size or max_prefill_token_num, or "
            "take a smaller model"
        )
    return (
        f"no cache block fits: cache_max_entry_count={wishes.share} of the {size(room)} that {taken} leave "
        f"free {where} is less than one block of {size(block)}; raise cache_max_entry_count or lower "
        "cache_block_seq_len"
    )


def _too_long(needs: Needs, wishes: Wishes, blocks: int, room: int, free_bound: str) -> str:
    asked = wishes.session_len or 0
    cache = -(-asked // needs.block_size) * needs.both_blocks
    return (
        f"session_len={asked} does not fit: one sequence takes {size(cache)} of cache, but "
        f"cache_max_entry_count={wishes.share} of the {size(room)} free after weights and workspace "
        f"{_where(free_bound)} is {size(int(room * wishes.share))}; set session_len to at most "
        f"{blocks * needs.block_size}, raise cache_max_entry_count or free memory"
    )


def _where(free_bound: str) -> str:
    if free_bound == "machine":
        return "on this machine"
    return f"in the control group {free_bound}" if free_bound.startswith("/") else f"on the {free_bound}"


def size(count: int) -> str:
    """Bytes for people: KiB, MiB or GiB with three digits or so."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= scale:
            return f"{count / scale:.2f} {unit}" if count < 10 * scale else f"{count / scale:.1f} {unit}"
    return f"{count} bytes"
