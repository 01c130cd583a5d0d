"""The memory account: figures checked by hand, and what must hold for every machine and wish."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmdeploy.errors import CapacityError
from lmdeploy.runtime.memory_plan import PROCESS_BYTES, MemoryPlan, Needs, Wishes, plan_memory, size

MIB, GIB = 2**20, 2**30

# A 7B model as the memory guides count it: 32 layers, 32 KV heads of 128 values, 16 bit: 512 KiB a token.
TOKEN = 2 * 32 * 32 * 128 * 2
NEEDS = Needs(weights=4 * GIB, workspace=100 * MIB, block=64 * TOKEN, block_size=64, token=TOKEN)
WISHES = Wishes(session_len=4096, model_len=8192, max_batch_size=32, share=0.8)


def test_figures_of_the_guides() -> None:
    assert TOKEN == 512 * 2**10
    plan = plan_memory(NEEDS, WISHES, free=24 * GIB)
    room = 24 * GIB - 4 * GIB - 100 * MIB - PROCESS_BYTES
    blocks = int(0.8 * room) // (64 * TOKEN)
    assert (plan.num_blocks, plan.kv_pool) == (blocks, blocks * 64 * TOKEN)
    # A conversation of 4096 tokens takes 2 GiB, and 80 % of almost 20 GiB are a little less than 16.
    assert plan.sequences == plan.sequences_by_memory == 7
    assert plan.bound == "memory"
    assert plan.total == 4 * GIB + 100 * MIB + PROCESS_BYTES + plan.kv_pool


def test_the_pool_is_no_larger_than_the_batch_can_use() -> None:
    plan = plan_memory(NEEDS, dataclasses.replace(WISHES, max_batch_size=3), free=64 * GIB)
    assert plan.kv_pool == 3 * 2 * GIB
    assert plan.sequences == 3
    assert plan.sequences_by_memory == 23
    assert plan.bound == "max_batch_size"


def test_default_length_is_the_models_or_what_fits() -> None:
    open_wish = dataclasses.replace(WISHES, session_len=None)
    assert plan_memory(NEEDS, open_wish, free=24 * GIB).session_len == 8192
    small = plan_memory(NEEDS, open_wish, free=6 * GIB)
    assert small.session_len == small.num_blocks * 64 < 8192
    assert small.sequences == 1


def test_a_length_that_does_not_fit_names_one_that_does() -> None:
    with pytest.raises(CapacityError) as caught:
        plan_memory(NEEDS, WISHES, free=5 * GIB)
    message = caught.value.message
    assert "session_len=4096" in message
    assert "cache_max_entry_count" in message
    fits = int(message.split("set session_len to at most ")[1].split(",")[0])
    plan_memory(NEEDS, dataclasses.replace(WISHES, session_len=fits), free=5 * GIB)
    with pytest.raises(CapacityError):
        plan_memory(NEEDS, dataclasses.replace(WISHES, session_len=fits + 1), free=5 * GIB)


def test_a_model_that_does_not_fit_names_what_it_takes() -> None:
    with pytest.raises(CapacityError, match=r"weights 4\.00 GiB.*3\.00 GiB are free on this machine"):
        plan_memory(NEEDS, WISHES, free=3 * GIB)
    with pytest.raises(CapacityError, match="in the control group /sys/fs/cgroup/job"):
        plan_memory(NEEDS, WISHES, free=3 * GIB, free_bound="/sys/fs/cgroup/job")


def test_a_share_below_one_block_names_the_share() -> None:
    room = 40 * MIB
    free = NEEDS.weights + NEEDS.workspace + PROCESS_BYTES + room
    with pytest.raises(CapacityError, match=r"cache_max_entry_count=0\.5 of the 40\.0 MiB"):
        plan_memory(NEEDS, dataclasses.replace(WISHES, share=0.5), free)


needs = st.builds(
    Needs,
    weights=st.integers(0, 8 * GIB),
    workspace=st.integers(0, GIB),
    block=st.integers(1, 64 * MIB),
    block_size=st.sampled_from([16, 64, 128]),
    token=st.just(1),
)
wishes = st.builds(
    Wishes,
    session_len=st.none() | st.integers(1, 100_000),
    model_len=st.integers(1, 200_000),
    max_batch_size=st.integers(1, 300),
    share=st.floats(0.01, 0.99),
)


def plan_or_none(needs: Needs, wishes: Wishes, free: int) -> MemoryPlan | None:
    try:
        return plan_memory(needs, wishes, free)
    except CapacityError:
        return None


@given(needs, wishes, st.integers(0, 64 * GIB))
def test_every_plan_fits_and_serves_what_it_says(needs: Needs, wishes: Wishes, free: int) -> None:
    plan = plan_or_none(needs, wishes, free)
    if plan is None:
        return
    blocks = -(-plan.session_len // needs.block_size)
    assert plan.total <= free
    assert plan.kv_pool <= wishes.share * (free - needs.weights - needs.workspace)
    assert plan.kv_pool == plan.num_blocks * needs.block
    assert 1 <= plan.sequences <= wishes.max_batch_size
    assert plan.sequences * blocks <= plan.num_blocks <= wishes.max_batch_size * blocks
    assert (plan.bound == "max_batch_size") == (plan.num_blocks == wishes.max_batch_size * blocks)
    assert plan.session_len == (wishes.session_len or min(wishes.model_len, plan.session_len))


@given(needs, wishes, st.integers(0, 64 * GIB), st.integers(0, 8 * GIB))
def test_more_memory_never_serves_less(needs: Needs, wishes: Wishes, free: int, more: int) -> None:
    before, after = plan_or_none(needs, wishes, free), plan_or_none(needs, wishes, free + more)
    if before is not None:
        assert after is not None
        assert after.session_len >= before.session_len
        if after.session_len == before.session_len:
            assert after.num_blocks >= before.num_blocks


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.50 KiB"), (92 * MIB, "92.0 MiB"), (GIB, "1.00 GiB")],
)
def test_sizes_for_people(count: int, text: str) -> None:
    assert size(count) == text
