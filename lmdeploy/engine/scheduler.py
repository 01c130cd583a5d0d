"""Which sequences compute how many tokens in the next step, and who gives up blocks when they run out.

Order of arrival decides everything: the oldest unfinished sequence advances in every step, the youngest is
preempted first. Decode rows come before prompt chunks, so running streams advance in every step too, and
chunks beside a stream are cut so that its reader does not wait long. All blocks of a prompt are taken at
admission; later a sequence grows by one block at a time. Knows no sampling and no events.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from lmdeploy.engine.batch import Row
from lmdeploy.engine.executor import Capabilities
from lmdeploy.engine.prefix_cache import PrefixCache
from lmdeploy.engine.request import Sequence
from lmdeploy.engine.stats import Bound, Totals
from lmdeploy.engine.step_cost import StepCost, StreamGap


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the engine is told beyond the executor's capabilities, which bound it too."""

    max_batch_size: int = 32  # rows in a step, and so sequences that hold blocks
    max_prefill_token_num: int = 8192  # prompt tokens computed in a step, beside the decode rows
    enable_prefix_caching: bool = True
    step_cost: StepCost | None = None  # None: prompts take their whole budget beside streams too


class Scheduler:
    """`waiting` holds no blocks, `running` does; both are in order of arrival."""

    def __init__(
        self, options: EngineOptions, caps: Capabilities, cache: PrefixCache, totals: Totals
    ) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        # One token for each running sequence always fits a step, so none can be starved by the others.
        self._max_rows = min(options.max_batch_size, caps.max_rows, caps.max_step_tokens)
        self._max_prefill = options.max_prefill_token_num
        self.max_tokens = caps.max_step_tokens
        self._step_cost = options.step_cost
        self._block_size = caps.block_size
        self._cache = cache
        self._pool = cache.pool
        self._totals = totals
        self.bound: Bound | None = None  # why the latest plan left somebody waiting
        self.started: list[str] = []  # requests that the latest plan admitted for the first time

    @property
    def longest_step(self) -> float:
        """Seconds that a step of `max_tokens` is expected to take; 0: not known."""
        return self._step_cost.step(self.max_tokens) if self._step_cost is not None else 0.0

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Take out a finished or aborted sequence and release its blocks."""
        (self.running if seq.num_blocks else self.waiting).remove(seq)
        self._release(seq)

    def plan(self) -> list[Row]:
        """Rows for one step, never empty while a sequence is unfinished; each has its blocks."""
        preemptions = self._totals.preemptions
        self.bound, self.started = None, []
        self._grow()
        if self._totals.preemptions > preemptions:
            self.bound = "kv_blocks"
        elif self.waiting:
            self._admit()
        return self._rows()

    def room_for_drafts(self, seq: Sequence, wanted: int) -> int:
        """Give a planned sequence blocks for `wanted` drafts, none that others need; how many have room.

        A draft takes no place behind the last token the request may have, nor where bans of ids would change.
        """
        most = min(wanted, seq.max_stored - seq.length)
        if seq.num_output < seq.request.min_new_tokens:
            most = min(most, seq.request.min_new_tokens - 1 - seq.num_output)
        lacking = -(-(seq.length + most) // self._block_size) - seq.num_blocks
        if lacking > 0:  # every running sequence may want a block for its own next token
            spare = self._pool.num_available - len(self.running)
            seq.append_blocks(self._pool.allocate(max(0, min(lacking, spare))))
        return max(0, min(most, seq.num_blocks * self._block_size - seq.length))

    def _grow(self) -> None:
        """Give each sequence the block for its next token, oldest first, at the cost of the youngest."""
        size = self._block_size
        for seq in [s for s in self.running if s.length > s.num_blocks * size]:
            while seq.num_blocks and not self._pool.num_available:
                self._preempt(self.running[-1])
            if not seq.num_blocks:  # it was the youngest itself, so those after it are gone as well
                return
            seq.append_blocks(self._pool.allocate(1))

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._release(seq)
        seq.preempted = True
        insort(self.waiting, seq, key=_order)
        self._totals.preemptions += 1

    def _release(self, seq: Sequence) -> None:
        self._cache.end(seq)
        self._pool.release(seq.drop_blocks())

    def _admit(self) -> None:
        """Start waiting sequences, oldest first, until one does not fit; it keeps its place."""
        index = 0
        while index < len(self.waiting):
            seq = self.waiting[index]
            if not self._has_budget(seq):
                return
            awaited = seq.wait_key
            found = self._cache.lookup(seq)
            if found is None:  # an older one is computing its prefix: nobody else need wait for that
                index += 1
            elif self._make_room(seq, found):
                del self.waiting[index]
                self._start(seq, found)
                self._totals.awaited_prefixes += awaited in seq.keys[: len(found)]
            else:
                return

    def _has_budget(self, seq: Sequence) -> bool:
        older = [s.length - s.num_computed for s in self.running if s.order < seq.order]
        decoding = older.count(1)
        budget = min(self._max_prefill, self.max_tokens - decoding)
        if len(older) >= self._max_rows:
            self.bound = "max_batch_size"
        elif sum(older) - decoding >= budget:
            self.bound = "prefill_budget"
        return self.bound is None

    def _make_room(self, seq: Sequence, found: list[int]) -> bool:
        """Whether rows and blocks suffice, if need be after preempting sequences younger than this one."""
        while not self._fits(seq, found):
            if not self.running or self.running[-1].order < seq.order:
                self.bound = "max_batch_size" if len(self.running) >= self._max_rows else "kv_blocks"
                return False
            self._preempt(self.running[-1])
        return True

    def _fits(self, seq: Sequence, found: list[int]) -> bool:
        if len(self.running) >= self._max_rows:
            return False
        need = -(-seq.length // self._block_size) - len(found)
        revived = sum(not self._pool.is_held(block) for block in found)
        # One block for each sequence that may still grow, or the newcomer would be preempted again at once.
        growing = sum(s.max_stored > s.num_blocks * self._block_size for s in self.running)
        return need + growing <= self._pool.num_available - revived

    def _start(self, seq: Sequence, found: list[int]) -> None:
        self._count_start(seq, found)
        self._pool.retain(found)
        seq.append_blocks(found)
        seq.append_blocks(self._pool.allocate(-(-seq.length // self._block_size) - len(found)))
        seq.num_published = len(found)
        seq.num_computed = len(found) * self._block_size
        self._cache.begin(seq)
        insort(self.running, seq, key=_order)

    def _count_start(self, seq: Sequence, found: list[int]) -> None:
        totals, tokens = self._totals, len(found) * self._block_size
        totals.shared_blocks += sum(self._pool.is_held(block) for block in found)
        if seq.preempted:
            totals.resumed_tokens += tokens
            return
        self.started.append(seq.request.request_id)
        seq.cached_tokens = tokens
        totals.cached_tokens += tokens
        totals.prompt_tokens += seq.num_prompt

    def _rows(self) -> list[Row]:
        rows = [(s, 1) for s in self.running if s.length - s.num_computed == 1]
        if len(rows) == len(self.running):
            return rows
        budget = min(self._max_prefill, self.max_tokens - len(rows))
        gap = self._stream_gap(rows)
        for seq in self.running:
            wanted = min(seq.length - seq.num_computed, budget)
            if seq.length - seq.num_computed > 1 and wanted > 0:
                if gap is not None:
                    wanted = gap.take(wanted, seq.num_computed)
                if wanted:
                    rows.append((seq, wanted))
                    budget -= wanted
        return rows

    def _stream_gap(self, decoding: list[Row]) -> StreamGap | None:
        """What bounds prompts in this step when somebody reads along."""
        if self._step_cost is None or not any(seq.request.streams for seq, _ in decoding):
            return None
        return StreamGap(self._step_cost, len(decoding))


def _order(seq: Sequence) -> int:
    return seq.order
