"""Detokeniser and stop strings: the same text for every way of cutting the stream."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from demo_model import demo_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from text_models import write_demo_directory, write_sentencepiece_directory
from tokenizers import Tokenizer as Library

from lmdeploy.text.detokenize import Detokenizer
from lmdeploy.text.stop_strings import StopStrings
from lmdeploy.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return load_tokenizer(demo_gguf())


@pytest.fixture(scope="module")
def demo_library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    path = write_demo_directory(tmp_path_factory.mktemp("stream") / "demo")
    return Library.from_file(str(path / "tokenizer.json"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sentencepiece_directory(tmp_path_factory.mktemp("stream") / "sp")


@pytest.fixture(scope="module")
def pieces(directory: Path) -> Tokenizer:
    return load_tokenizer(directory)


def cut(items: list[int], cuts: list[int]) -> list[list[int]]:
    """`items` in consecutive parts; the numbers say where to cut."""
    at = sorted({c % (len(items) + 1) for c in cuts} | {0, len(items)})
    return [items[a:b] for a, b in itertools.pairwise(at)]


def stream(tokenizer: Tokenizer, parts: list[list[int]], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip)
    return [*(detokenizer.feed(part) for part in parts), detokenizer.finish()]


CUTS = st.lists(st.integers(0, 1000), max_size=12)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=30), cuts=CUTS, skip=st.booleans())
def test_byte_level_stream_equals_the_library(
    ids: list[int], cuts: list[int], skip: bool, demo: Tokenizer, demo_library: Library
) -> None:
    assert "".join(stream(demo, cut(ids, cuts), skip)) == demo_library.decode(ids, skip_special_tokens=skip)


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.characters(max_codepoint=0x1FFFF, exclude_categories=["C"])), cuts=CUTS)
def test_characters_are_never_split(text: str, cuts: list[int], demo: Tokenizer) -> None:
    """Every piece of the stream is part of the text, without a replacement character of ours."""
    parts = stream(demo, cut(demo.encode(text), cuts))
    assert "".join(parts) == text
    for part in parts:
        assert part in text
        part.encode()


def test_a_family_emoji_token_by_token(demo: Tokenizer) -> None:
    text = "👩‍👩‍👧 é 漢字"
    parts = stream(demo, [[i] for i in demo.encode(text)])
    assert "".join(parts) == text
    assert "\ufffd" not in "".join(parts)


def test_replacement_characters_appear_once_certain(demo: Tokenizer) -> None:
    first = demo.encode("漢")
    assert len(first) > 1
    detokenizer = Detokenizer(demo)
    assert detokenizer.feed(first[:1]) == ""
    assert detokenizer.feed(demo.encode(" a")) == "\ufffd a"
    assert detokenizer.feed(first[:1]) == ""
    assert detokenizer.finish() == "\ufffd"


@settings(max_examples=300, deadline=None)
@given(data=st.data(), cuts=CUTS)
def test_sentencepiece_stream_equals_one_decode(
    data: st.DataObject, cuts: list[int], pieces: Tokenizer, directory: Path
) -> None:
    """Over all ids but single bytes, for which the library has another view of broken characters."""
    library = Library.from_file(str(directory / "tokenizer.json"))
    ids = data.draw(
        st.lists(st.integers(259, pieces.vocab_size - 1) | st.sampled_from([0, 1, 2]), max_size=20)
    )
    assert "".join(stream(pieces, cut(ids, cuts))) == library.decode(ids)


@pytest.mark.parametrize(
    "texts", [["▁▁", "▁two", "▁", "▁lea"], ["▁", "▁lea"], ["▁lea", "▁"], ["▁", "▁", "▁"]]
)
def test_leading_and_double_spaces_survive(texts: list[str], pieces: Tokenizer, directory: Path) -> None:
    """The same for every chunking."""
    library = Library.from_file(str(directory / "tokenizer.json"))
    ids = [pieces.id_of(text) for text in texts]
    whole = library.decode(ids)
    assert whole == "".join(texts).replace("▁", " ")[1:]
    for mask in range(1 << (len(ids) - 1)):
        parts = cut(ids, [i + 1 for i in range(len(ids) - 1) if mask >> i & 1])
        assert "".join(stream(pieces, parts)) == whole


def test_byte_fallback_makes_whole_characters(pieces: Tokenizer) -> None:
    ids = [3 + byte for byte in "漢👩".encode()]
    parts = stream(pieces, [[i] for i in ids])
    assert "".join(parts) == "漢👩"
    assert [part for part in parts if part] == ["漢", "👩"]


def test_control_tokens_are_shown_only_when_asked(demo: Tokenizer) -> None:
    ids = [1, *demo.encode("Hi"), 2]
    assert "".join(stream(demo, [ids])) == "Hi"
    assert "".join(stream(demo, [ids], skip=False)) == "<|im_start|>Hi<|im_end|>"


def whole_match(text: str, stops: list[str]) -> tuple[int, str] | None:
    """(start, stop) by definition: the first position where some stop is complete, the longest such stop."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return end - len(stop), stop
    return None


@settings(max_examples=800, deadline=None)
@given(
    text=st.text("ab\n", max_size=24),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4),
    cuts=CUTS,
    include=st.booleans(),
)
def test_stop_strings_for_every_chunking(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    """Released text never shows part of the stop that ended it, and holds nothing back without need."""
    filter_, released = StopStrings(stops, include), ""
    fed = ""
    for part in cut(list(map(ord, text)), cuts):
        fed += "".join(map(chr, part))
        released += filter_.feed("".join(map(chr, part)))
        found = whole_match(fed, stops)
        if found is None:
            held = fed[len(released) :]
            assert fed.startswith(released)
            assert not held or any(stop.startswith(held) for stop in stops)
    released += filter_.finish()
    found = whole_match(text, stops)
    assert filter_.matched == (found[1] if found else None)
    expected = text if found is None else text[: found[0] + (len(found[1]) if include else 0)]
    assert released == expected


def test_a_stop_that_begins_inside_a_token(demo: Tokenizer) -> None:
    """The stop is cut out of a text across tokens."""
    text = "The capital of France is Paris, of course. And more."
    stop = text[10:24]
    detokenizer, filter_ = Detokenizer(demo), StopStrings([stop])
    released = ""
    for token in demo.encode(text):
        released += filter_.feed(detokenizer.feed([token]))
    released += filter_.feed(detokenizer.finish()) + filter_.finish()
    assert released == text[:10]
    assert filter_.matched == stop


def test_no_stops_hold_nothing_back() -> None:
    filter_ = StopStrings([])
    assert filter_.feed("abc") == "abc"
    assert filter_.finish() == ""
