"""What --calib-dataset says, for every form of name."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmdeploy.errors import ConfigError
from lmdeploy.lite.data.source import parse_source

NAMES = ("a.jsonl", "b.txt", r"C:\data\x.txt", "C:/data/y.jsonl", "d, e.txt", "f:2.txt", "g:0.5", "wikitext2")


def parts(text: str, *existing: str) -> list[tuple[str, float]]:
    return [(part.name, part.weight) for part in parse_source(text, exists=lambda name: name in existing)]


def test_forms() -> None:
    assert parts("wikitext2") == [("wikitext2", 1.0)]
    assert parts("a.jsonl:0.75,b.txt:0.25") == [("a.jsonl", 0.75), ("b.txt", 0.25)]
    assert parts("a:3, b") == [("a", 0.75), ("b", 0.25)]
    assert parts(r"C:\x.txt") == [(r"C:\x.txt", 1.0)]
    assert parts(r"C:\x.txt:3,D:/y:1") == [(r"C:\x.txt", 0.75), ("D:/y", 0.25)]


def test_existing_paths_keep_their_commas_and_colons() -> None:
    assert parts("one, two.txt", "one, two.txt") == [("one, two.txt", 1.0)]
    assert parts("one, two.txt:3,c4", "one, two.txt") == [("one, two.txt", 0.75), ("c4", 0.25)]
    assert parts("c4:1,x,y,z:3", "x,y,z") == [("c4", 0.25), ("x,y,z", 0.75)]
    assert parts("data:2", "data:2") == [("data:2", 1.0)]
    assert parts("data:2:3,c4", "data:2") == [("data:2", 0.75), ("c4", 0.25)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("a,,b", "empty"),
        (",", "empty"),
        ("a:0", "weight 0 of 'a'"),
        ("a:-1", "weight -1"),
        ("a:nan", "weight nan"),
        ("a:inf,b", "weight inf"),
        ("a:1e99", "weight 1e99"),
        ("a:1,a:2", "a is given twice"),
    ],
)
def test_mistakes(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        parts(text)
    assert "\n" not in error.value.message


@given(
    st.lists(st.tuples(st.sampled_from(NAMES), st.floats(1e-3, 1e6)), min_size=1, unique_by=lambda x: x[0])
)
def test_what_is_written_is_read_again(chosen: list[tuple[str, float]]) -> None:
    text = ",".join(f"{name}:{weight!r}" for name, weight in chosen)
    total = sum(weight for _, weight in chosen)
    found = parts(text, *NAMES)
    assert [name for name, _ in found] == [name for name, _ in chosen]
    for (_, share), (_, weight) in zip(found, chosen, strict=True):
        assert math.isclose(share, weight / total, rel_tol=1e-9)


@given(
    st.text(max_size=40) | st.text("ab:,.0123eE-+C\\/ ", max_size=40), st.sets(st.text("ab:,.1", max_size=4))
)
def test_any_text_gives_parts_or_one_line(text: str, existing: set[str]) -> None:
    try:
        found = parts(text, *existing)
    except ConfigError as error:
        message = error.message
        found = []
    if not found:
        assert len(message.splitlines()) == 1
        return
    assert found and all(name.strip() and weight > 0 for name, weight in found)
    assert math.isclose(sum(weight for _, weight in found), 1.0)
