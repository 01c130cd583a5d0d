"""Which sequences compute how many tokens in the next step, and who gives up blocks when they run out.

One order decides everything: by priority, then by the time the queue let a sequence go first. The first
unfinished sequence advances in every step, the last is preempted first. Decode rows come before prompt
chunks, so running streams advance in every step too, and chunks beside a stream are cut so that its reader
does not wait long. All blocks of a prompt are taken at admission; later a sequence grows by one block at a
time. With lanes, long prompts have a share of all this that they neither exceed nor lose. Knows no sampling
and no events.
"""

from __future__ import annotations

from bisect import bisect, insort
from dataclasses import dataclass

from lmdeploy.engine.batch import Row
from lmdeploy.engine.executor import Capabilities
from lmdeploy.engine.lanes import LaneOptions, LongLane, long_members
from lmdeploy.engine.prefix_cache import PrefixCache
from lmdeploy.engine.queue import Queue, Rank
from lmdeploy.engine.request import Sequence
from lmdeploy.engine.stats import Bound, Totals
from lmdeploy.engine.step_cost import StepCost, StreamGap, gap_seconds


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the engine is told beyond the executor's capabilities, which bound it too."""

    max_batch_size: int = 32  # rows in a step, and so sequences that hold blocks
    max_prefill_token_num: int = 8192  # prompt tokens computed in a step, beside the decode rows
    enable_prefix_caching: bool = True
    step_cost: StepCost | None = None  # None: prompts take their whole budget beside streams too
    lanes: LaneOptions | None = None  # None: long prompts are like others
    batching_window: float = 0.0  # seconds its owner lets an idle engine wait for more than one request
    max_queue: int | None = None  # requests beyond max_batch_size; more are refused. None: any number


class Scheduler:
    """`running` holds blocks, in order. All others wait: in the queue, or looked at and turned away."""

    def __init__(
        self, options: EngineOptions, caps: Capabilities, cache: PrefixCache, totals: Totals
    ) -> None:
        self.running: list[Sequence] = []
        self._queue = Queue()
        self._turned_away: dict[bool, list[Sequence]] = {False: [], True: []}  # by lane, in order
        # One token for each running sequence always fits a step, so none can be starved by the others.
        self._max_rows = min(options.max_batch_size, caps.max_rows, caps.max_step_tokens)
        self._max_prefill = options.max_prefill_token_num
        self.max_tokens = caps.max_step_tokens
        self._step_cost = options.step_cost
        self._lane = LongLane(options.lanes, self._max_rows, caps.num_blocks) if options.lanes else None
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

    @property
    def waiting(self) -> list[Sequence]:
        """All that hold no blocks."""
        return [*self._turned_away[False], *self._turned_away[True], *self._queue]

    def add(self, seq: Sequence) -> None:
        seq.is_long = self._lane is not None and self._lane.takes(seq.num_prompt)
        self._queue.add(seq)

    def remove(self, seq: Sequence) -> None:
        """Take out a finished or aborted sequence and release its blocks."""
        if seq.num_blocks:
            self.running.remove(seq)
        elif self._queue.was_taken(seq):
            self._turned_away[seq.is_long].remove(seq)
        self._release(seq)
        self._queue.settle(seq)

    def plan(self) -> list[Row]:
        """Rows for one step, never empty while a sequence is unfinished; each has its blocks."""
        preemptions = self._totals.preemptions
        self.bound, self.started = None, []
        self._grow()
        if self._totals.preemptions > preemptions:
            self.bound = "kv_blocks"
        else:
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
            if seq.is_long and (room := self._lane_room()) is not None:
                spare = min(spare, room)
            seq.append_blocks(self._pool.allocate(max(0, min(lacking, spare))))
        return max(0, min(most, seq.num_blocks * self._block_size - seq.length))

    def _grow(self) -> None:
        """Give each sequence the block for its next token, first ones first, at the cost of the last."""
        size = self._block_size
        for seq in [s for s in self.running if s.length > s.num_blocks * size]:
            while seq.num_blocks and (rivals := self._rivals_in_growth(seq)):
                self._preempt(rivals[-1])
            if seq.num_blocks:
                seq.append_blocks(self._pool.allocate(1))

    def _rivals_in_growth(self, seq: Sequence) -> list[Sequence]:
        """Sequences one of which must give way, maybe this one itself, before it gets another block."""
        if seq.is_long and (room := self._lane_room()) is not None and room < 1:
            return long_members(self.running)
        return [] if self._pool.num_available else self.running

    def _lane_room(self) -> int | None:
        assert self._lane is not None
        return self._lane.room_to_grow(long_members(self.running))

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._release(seq)
        seq.preempted = True
        insort(self._turned_away[seq.is_long], seq, key=_rank)
        self._totals.preemptions += 1

    def _release(self, seq: Sequence) -> None:
        self._cache.end(seq)
        self._pool.release(seq.drop_blocks())

    def _admit(self) -> None:
        """Start waiting sequences in order. One that does not fit keeps its place and holds up its lane; a
        short one also the other, which would take what it waits for."""
        at = {False: 0, True: 0}  # by lane: who is next among those turned away
        while found_next := [s for lane, i in at.items() if (s := self._candidate(lane, i)) is not None]:
            seq = min(found_next, key=_rank)
            if not self._has_budget(seq):
                del at[seq.is_long]
                continue
            at[seq.is_long] = self._look_at(seq, at[seq.is_long])
            awaited = seq.wait_key
            found = self._cache.lookup(seq)
            if found is None:  # an older one is computing its prefix: nobody else need wait for that
                at[seq.is_long] += 1
            elif self._make_room(seq, found):
                self._turned_away[seq.is_long].remove(seq)
                self._start(seq, found)
                self._totals.awaited_prefixes += awaited in seq.keys[: len(found)]
            elif seq.is_long:
                del at[True]
            else:
                return

    def _candidate(self, is_long: bool, index: int) -> Sequence | None:
        """The one turned away at `index`, unless the queue has one that goes before it."""
        turned_away, fresh = self._turned_away[is_long], self._queue.peek(is_long)
        old = turned_away[index] if index < len(turned_away) else None
        if old is None or fresh is None:
            return old or fresh
        return min(old, fresh, key=_rank)

    def _look_at(self, seq: Sequence, index: int) -> int:
        """Take the sequence out of the queue, if it is there; its place among those turned away."""
        if self._queue.was_taken(seq):
            return index
        self._queue.take(seq)
        turned_away = self._turned_away[seq.is_long]
        index = bisect(turned_away, seq.rank, key=_rank)
        turned_away.insert(index, seq)
        return index

    def _has_budget(self, seq: Sequence) -> bool:
        before = [s for s in self.running if s.rank < seq.rank]
        left = [s.length - s.num_computed for s in before if s.is_long == seq.is_long]
        decoding = left.count(1)
        budget = min(self._max_prefill, self.max_tokens - decoding)
        if self._lane is not None and seq.is_long:
            budget = self._lane.split(budget, long_first=True)[1]
        if len(before) >= self._max_rows:
            self._hold_up(seq, "max_batch_size")
        elif sum(left) - decoding >= budget:
            self._hold_up(seq, "prefill_budget")
        else:
            return True
        return False

    def _hold_up(self, seq: Sequence, bound: Bound) -> None:
        """Note why a sequence must wait. Within their lane long ones wait for that first of all."""
        if self._lane is not None and seq.is_long:
            self.bound = self.bound or "long_lane"
        else:
            self.bound = bound

    def _make_room(self, seq: Sequence, found: list[int]) -> bool:
        """Whether rows and blocks suffice, if need be after preempting sequences that come after this one."""
        while rivals := self._rivals(seq, found):
            if rivals[-1].rank < seq.rank:
                self._hold_up(seq, "max_batch_size" if len(self.running) >= self._max_rows else "kv_blocks")
                return False
            self._preempt(rivals[-1])
        return self._fits(seq, found)

    def _rivals(self, seq: Sequence, found: list[int]) -> list[Sequence]:
        """Running sequences one of which must give way before this one can start."""
        if self._lane is not None and seq.is_long:
            members = long_members(self.running)
            if self._lane.is_full(members, found, self._lacking(seq, found)):
                return members
        return [] if self._fits(seq, found) else self.running

    def _lacking(self, seq: Sequence, found: list[int]) -> int:
        return -(-seq.length // self._block_size) - len(found)

    def _fits(self, seq: Sequence, found: list[int]) -> bool:
        if len(self.running) >= self._max_rows:
            return False
        revived = sum(not self._pool.is_held(block) for block in found)
        # One block for each sequence that may still grow, or the newcomer would be preempted again at once.
        growing = sum(s.max_stored > s.num_blocks * self._block_size for s in self.running)
        return self._lacking(seq, found) + growing <= self._pool.num_available - revived

    def _start(self, seq: Sequence, found: list[int]) -> None:
        self._count_start(seq, found)
        self._pool.retain(found)
        seq.append_blocks(found)
        seq.append_blocks(self._pool.allocate(self._lacking(seq, found)))
        seq.num_published = len(found)
        seq.num_computed = len(found) * self._block_size
        self._cache.begin(seq)
        insort(self.running, seq, key=_rank)

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
        prompts = [s for s in self.running if s.length - s.num_computed > 1]
        budget = min(self._max_prefill, self.max_tokens - len(rows))
        seconds = self._gap_seconds(rows)
        long = long_members(prompts)
        if self._lane is None or not long:
            return rows + self._chunks(prompts, budget, len(rows), seconds)
        for_short, for_long = self._lane.split(budget, long_first=prompts[0].is_long)
        share = self._lane.share
        short = [s for s in prompts if not s.is_long]
        rows += self._chunks(short, for_short, len(rows), None if seconds is None else seconds * (1 - share))
        tokens = sum(count for _, count in rows)
        if seconds is not None:
            seconds *= share
        elif self._step_cost is not None:  # nobody reads along: the time of so many tokens without a context
            seconds = self._step_cost.step(tokens + for_long) - self._step_cost.step(tokens)
        return rows + self._chunks(long, for_long, tokens, seconds)

    def _chunks(self, prompts: list[Sequence], budget: int, tokens: int, seconds: float | None) -> list[Row]:
        """Pieces of prompts beside `tokens` others in the step, within what they may add to it."""
        rows: list[Row] = []
        gap = None
        if self._step_cost is not None and seconds is not None:
            gap = StreamGap(self._step_cost, tokens, seconds)
        for seq in prompts:
            wanted = min(seq.length - seq.num_computed, budget)
            if wanted > 0 and gap is not None:
                wanted = gap.take(wanted, seq.num_computed)
            if wanted > 0:
                rows.append((seq, wanted))
                budget -= wanted
        return rows

    def _gap_seconds(self, decoding: list[Row]) -> float | None:
        """What bounds prompts in this step when somebody reads along."""
        if self._step_cost is None or not any(seq.request.streams for seq, _ in decoding):
            return None
        return gap_seconds(self._step_cost, len(decoding))


def _rank(seq: Sequence) -> Rank:
    return seq.rank
