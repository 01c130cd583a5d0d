"""Repetition loops: the definition checked by an independent search, and its properties."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lmdeploy.quality.loops import LEAST_TIMES, LEAST_TOKENS, LONGEST_PERIOD, has_loop, loop_period

few = st.integers(0, 2)
tokens = st.lists(st.integers(0, 5), max_size=60)


def by_definition(ids: list[int]) -> bool:
    for begin in range(len(ids)):
        for period in range(1, LONGEST_PERIOD + 1):
            length = max(LEAST_TIMES * period, LEAST_TOKENS)
            stretch = ids[begin : begin + length]
            whole = len(stretch) == length
            if whole and all(stretch[i] == stretch[i - period] for i in range(period, length)):
                return True
    return False


@given(st.lists(few, max_size=40), st.lists(few, min_size=1, max_size=6), st.integers(0, 40))
def test_it_is_the_definition(begin: list[int], part: list[int], times: int) -> None:
    ids = begin + (part * times)[:40]
    assert has_loop(ids) == by_definition(ids)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=LONGEST_PERIOD), tokens, tokens)
def test_what_stands_around_does_not_hide_a_loop(
    part: list[int], before: list[int], after: list[int]
) -> None:
    times = max(LEAST_TIMES, -(-LEAST_TOKENS // len(part)))
    found = loop_period(before + part * times + after)
    assert found is not None and found <= len(part)


@given(tokens)
def test_names_of_tokens_do_not_matter(ids: list[int]) -> None:
    assert has_loop(ids) == has_loop([1000 - 7 * i for i in ids])


@given(st.permutations(range(100)))
def test_different_tokens_are_no_loop(ids: list[int]) -> None:
    assert not has_loop(ids) and not has_loop(ids * (LEAST_TIMES - 1))


def test_edges() -> None:
    assert not has_loop([]) and not has_loop([1])
    assert has_loop([1] * LEAST_TOKENS) and not has_loop([1] * (LEAST_TOKENS - 1))
    part = list(range(LONGEST_PERIOD))
    assert has_loop(part * LEAST_TIMES) and not has_loop((part * LEAST_TIMES)[:-1])
    assert not has_loop([*part, 64] * LEAST_TIMES)
