"""Where prompt lookup finds drafts, against a plain search over lists."""

from __future__ import annotations

from engine_cases import request
from hypothesis import given, settings
from hypothesis import strategies as st

from lmdeploy.engine.prompt_lookup import PromptLookup
from lmdeploy.engine.request import Sequence


def drafts(tokens: list[int], count: int = 4, shortest: int = 2, longest: int = 4) -> list[int] | None:
    lookup = PromptLookup(shortest, longest)
    lead = lookup.find(Sequence(request("a", tokens), 0))
    return None if lead is None else lookup.propose([(lead, count)])[0]


def searched(tokens: list[int], shortest: int, longest: int) -> tuple[int, int] | None:
    """(length of the match, place behind it): the longest, of these the latest."""
    for size in range(longest, shortest - 1, -1):
        for place in range(len(tokens) - 1, size - 1, -1):
            if len(tokens) > size and tokens[place - size : place] == tokens[-size:]:
                return size, place
    return None


def test_drafts_are_what_followed_before() -> None:
    assert drafts([1, 2, 3, 4, 5, 6, 7, 1, 2, 3]) == [4, 5, 6, 7]


def test_the_longer_match_is_followed_then_the_later() -> None:
    assert drafts([1, 2, 3, 9, 8, 2, 3, 7, 7, 1, 2, 3], count=1) == [9]
    assert drafts([1, 2, 9, 1, 2, 8, 5, 1, 2], count=1) == [8]


def test_what_reaches_the_end_repeats_itself() -> None:
    assert drafts([7, 1, 2, 3, 1, 2, 3], count=7) == [1, 2, 3, 1, 2, 3, 1]
    assert drafts([5, 5, 5], count=3) == [5, 5, 5]


def test_without_a_match_there_is_no_lead() -> None:
    assert drafts([1, 2, 3, 4]) is None
    assert drafts([1, 2]) is None
    assert drafts([1]) is None
    assert drafts([1, 2, 3, 1], shortest=2) is None


@settings(max_examples=300, derandomize=True, database=None, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 3), st.integers(0, 3))
def test_finds_what_a_plain_search_finds(tokens: list[int], shortest: int, more: int) -> None:
    lead = PromptLookup(shortest, shortest + more).find(Sequence(request("a", tokens), 0))
    found = None if lead is None else (lead.kind + shortest, lead.place)
    assert found == searched(tokens, shortest, shortest + more)
