"""States of cache blocks and the order in which cached ones are given up."""

from __future__ import annotations

import pytest

from lmdeploy.engine.block_pool import BlockPool


def counts(pool: BlockPool) -> tuple[int, int, int]:
    pool.check()
    return pool.num_free, pool.num_held, pool.num_cached


def test_blocks_move_between_free_held_and_cached() -> None:
    pool = BlockPool(4, on_evict=lambda block: None)
    assert counts(pool) == (4, 0, 0)
    first, second = pool.allocate(2)
    pool.publish(first)
    assert counts(pool) == (2, 2, 0)
    pool.release([first, second])
    assert counts(pool) == (3, 0, 1)
    pool.retain([first])
    assert counts(pool) == (3, 1, 0)


def test_a_block_stays_held_until_its_last_holder_leaves() -> None:
    pool = BlockPool(2, on_evict=lambda block: None)
    (block,) = pool.allocate(1)
    pool.retain([block])
    pool.release([block])
    assert pool.is_held(block)
    pool.release([block])
    assert counts(pool) == (2, 0, 0)


def test_free_blocks_go_first_then_the_longest_unused_tail_first() -> None:
    evicted: list[int] = []
    pool = BlockPool(5, evicted.append)
    old, new = pool.allocate(2), pool.allocate(2)
    for block in old + new:
        pool.publish(block)
    pool.release(old)
    pool.release(new)
    (free,) = pool.allocate(1)
    assert free not in old + new
    assert evicted == []
    assert pool.allocate(4) == evicted == [old[1], old[0], new[1], new[0]]
    assert counts(pool) == (0, 5, 0)


def test_use_renews_a_cached_block() -> None:
    evicted: list[int] = []
    pool = BlockPool(2, evicted.append)
    a, b = pool.allocate(2)
    for block in (a, b):
        pool.publish(block)
        pool.release([block])
    pool.retain([a])
    pool.release([a])
    pool.allocate(1)
    assert evicted == [b]


def test_a_retracted_block_is_free_once_nobody_holds_it() -> None:
    pool = BlockPool(2, on_evict=lambda block: None)
    held, cached = pool.allocate(2)
    pool.publish(held)
    pool.publish(cached)
    pool.release([cached])
    pool.retract(held)
    pool.retract(cached)
    assert counts(pool) == (1, 1, 0)
    pool.release([held])
    assert counts(pool) == (2, 0, 0)


def test_misuse_is_noticed() -> None:
    pool = BlockPool(1, on_evict=lambda block: None)
    with pytest.raises(AssertionError, match="beyond"):
        pool.allocate(2)
    with pytest.raises(AssertionError, match="nobody holds"):
        pool.release([0])
    with pytest.raises(AssertionError, match="nobody holds"):
        pool.publish(0)
    pool._free.append(0)
    with pytest.raises(AssertionError, match="free twice"):
        pool.check()
