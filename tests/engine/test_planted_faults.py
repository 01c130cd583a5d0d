"""Faults planted into the engine core one at a time: the fuzz must notice each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from engine_fuzz import fuzz

from lmdeploy.engine import prefix_cache
from lmdeploy.engine.batch import Packer
from lmdeploy.engine.block_pool import BlockPool
from lmdeploy.engine.lanes import LongLane
from lmdeploy.engine.loop import Engine
from lmdeploy.engine.prefix_cache import Entry, PrefixCache
from lmdeploy.engine.queue import Queue
from lmdeploy.engine.request import PenaltyHistory, Sequence
from lmdeploy.engine.scheduler import Scheduler

Patch = pytest.MonkeyPatch
FAULTS: list[Callable[[Patch], None]] = []


def fault(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    FAULTS.append(plant)
    return plant


def after(patch: Patch, owner: type, name: str, change: Callable[..., None]) -> None:
    """Call `change(result, *arguments)` after the method."""
    original = getattr(owner, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        change(result, *args, **kwargs)
        return result

    patch.setattr(owner, name, changed)


@fault
def penalties_do_not_count_drafts(patch: Patch) -> None:
    def views(history: PenaltyHistory, drafts: list[int]) -> list[Any]:
        return [history.view()] * (len(drafts) + 1)

    patch.setattr(PenaltyHistory, "views", views)


@fault
def penalties_keep_wrong_drafts(patch: Patch) -> None:
    patch.setattr(PenaltyHistory, "take_back", lambda history, tokens: None)


@fault
def every_draft_counts_as_right(patch: Patch) -> None:
    def accept(
        engine: Engine, seq: Sequence, drafts: Any, result: Any, first: int, drawn: list[int], event: Any
    ) -> None:
        for sample, token in enumerate(drawn, first):
            if event.finish_reason is None:
                engine._advance(seq, 1)
                engine._append(seq, result, sample, token, event)

    patch.setattr(Engine, "_accept_drafts", accept)


@fault
def hash_ignores_the_parent(patch: Patch) -> None:
    original = prefix_cache.block_key
    patch.setattr(prefix_cache, "block_key", lambda parent, tokens: original(b"", tokens))
    patch.setattr(Entry, "holds", lambda entry, parent, tokens: entry.tokens == tokens)


@fault
def hash_ignores_the_salt(patch: Patch) -> None:
    patch.setattr(prefix_cache, "root_key", lambda salt: b"salt")


@fault
def hash_sums_the_tokens(patch: Patch) -> None:
    patch.setattr(prefix_cache, "block_key", lambda parent, tokens: b"%d" % (sum(parent) + sum(tokens)))
    patch.setattr(Entry, "holds", lambda entry, parent, tokens: True)


@fault
def cached_prefix_one_token_too_long(patch: Patch) -> None:
    def change(_: None, self: Scheduler, seq: Sequence, found: list[int]) -> None:
        seq.num_computed += bool(found)

    after(patch, Scheduler, "_start", change)


@fault
def whole_prompt_taken_from_the_cache(patch: Patch) -> None:
    patch.setattr(Sequence, "reusable_tokens", property(lambda seq: seq.length))


@fault
def scored_positions_taken_from_the_cache(patch: Patch) -> None:
    patch.setattr(Sequence, "reusable_tokens", property(lambda seq: seq.length - 1))


@fault
def shared_block_written(patch: Patch) -> None:
    def change(_: None, self: Scheduler, seq: Sequence, found: list[int]) -> None:
        seq.num_computed -= bool(found)

    after(patch, Scheduler, "_start", change)


@fault
def block_freed_while_referenced(patch: Patch) -> None:
    def release(pool: BlockPool, blocks: list[int]) -> None:
        for block in blocks:
            pool._refs[block] = 0
            pool._published[block] = False
            pool._free.append(block)

    patch.setattr(BlockPool, "release", release)


@fault
def matched_blocks_not_retained(patch: Patch) -> None:
    patch.setattr(BlockPool, "retain", lambda pool, blocks: None)


@fault
def evicted_block_stays_findable(patch: Patch) -> None:
    patch.setattr(PrefixCache, "_forget", lambda cache, block: cache._key_of.pop(block))


@fault
def published_before_computed(patch: Patch) -> None:
    def change(_: None, self: PrefixCache, seq: Sequence) -> None:
        computed, seq.num_computed = seq.num_computed, seq.length
        self.publish(seq)
        seq.num_computed = computed

    after(patch, PrefixCache, "begin", change)


@fault
def preempted_row_still_scheduled(patch: Patch) -> None:
    def plan(self: Scheduler) -> Any:
        rows = self._rows()
        self._grow()
        self._admit()
        return rows or self._rows()

    patch.setattr(Scheduler, "plan", plan)


@fault
def preemption_takes_the_oldest(patch: Patch) -> None:
    original = Scheduler._preempt
    patch.setattr(Scheduler, "_preempt", lambda self, seq: original(self, self.running[0]))


@fault
def output_counted_as_prompt_after_preemption(patch: Patch) -> None:
    def change(_: None, self: Scheduler, seq: Sequence) -> None:
        seq.num_prompt = seq.length

    after(patch, Scheduler, "_preempt", change)


@fault
def penalty_history_lost_by_preemption(patch: Patch) -> None:
    def change(_: None, self: Scheduler, seq: Sequence) -> None:
        if seq.history is not None:
            seq.history._counts[:] = 0

    after(patch, Scheduler, "_preempt", change)


@fault
def abort_forgets_to_free(patch: Patch) -> None:
    def abort(self: Engine, request_id: str) -> None:
        seq = self._live.get(request_id)
        if seq is not None and seq.num_blocks:
            patch_release = self._cache.pool.release
            self._cache.pool.release = lambda blocks: None  # type: ignore[method-assign]
            original(self, request_id)
            self._cache.pool.release = patch_release  # type: ignore[method-assign]
        else:
            original(self, request_id)

    original = Engine.abort
    patch.setattr(Engine, "abort", abort)


@fault
def abort_leaves_its_prefix_in_flight(patch: Patch) -> None:
    patch.setattr(PrefixCache, "end", lambda cache, seq: None)


@fault
def context_length_wrong_after_a_chunk(patch: Patch) -> None:
    def change(_: None, self: Engine, seq: Sequence, num_new: int, *rest: Any) -> None:
        seq.num_computed -= seq.num_computed < seq.length and num_new > 1

    after(patch, Engine, "_advance", change)


@fault
def blocks_of_a_neighbour_packed(patch: Patch) -> None:
    def change(batch: Any, self: Packer, rows: Any, masks: Any) -> None:
        batch.block_ids[:] = batch.block_ids[::-1].copy()

    after(patch, Packer, "pack", change)


@fault
def columns_kept_when_the_requests_change(patch: Patch) -> None:
    original = Packer._constant_columns

    def kept(self: Packer, records: list[bytes]) -> Any:
        last = self._last_records
        return self._columns if last and len(last) == len(records) else original(self, records)

    patch.setattr(Packer, "_constant_columns", kept)


@fault
def head_of_the_queue_starves(patch: Patch) -> None:
    original = Scheduler._rows

    def rows(self: Scheduler) -> Any:
        self.running.reverse()
        planned = original(self)
        self.running.reverse()
        return planned

    patch.setattr(Scheduler, "_rows", rows)


@fault
def the_queue_forgets_who_was_chosen(patch: Patch) -> None:
    original = Queue.take

    def take(queue: Queue, seq: Sequence) -> None:
        original(queue, seq)
        seq.rank = (*seq.rank[:2], -seq.rank[2])

    patch.setattr(Queue, "take", take)
    patch.setattr(Scheduler, "_make_room", Scheduler._fits)  # else the older would take its place back


@fault
def priorities_are_turned_round(patch: Patch) -> None:
    original = Queue.add

    def add(queue: Queue, seq: Sequence) -> None:
        seq.request = replace(seq.request, priority=-seq.request.priority)
        original(queue, seq)

    patch.setattr(Queue, "add", add)


@fault
def the_long_lane_takes_all_tokens(patch: Patch) -> None:
    patch.setattr(LongLane, "split", lambda lane, budget, long_first: (0, budget))


@fault
def the_long_lane_takes_all_blocks(patch: Patch) -> None:
    patch.setattr(LongLane, "_room", lambda lane, members, found: 1 << 20)


@fault
def the_long_lane_grows_at_will(patch: Patch) -> None:
    patch.setattr(LongLane, "room_to_grow", lambda lane, members: None)


@fault
def a_long_prompt_holds_up_short_ones_in_the_step(patch: Patch) -> None:
    patch.setattr(LongLane, "split", lambda lane, budget, long_first: (0, 1))


@fault
def prompts_before_running_streams(patch: Patch) -> None:
    original = Scheduler._rows

    def rows(self: Scheduler) -> Any:
        planned = original(self)
        prefill = [row for row in planned if row[1] > 1]
        return prefill or planned

    patch.setattr(Scheduler, "_rows", rows)


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_the_fuzz_notices(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, LookupError, ValueError)):
        fuzz(1000)
