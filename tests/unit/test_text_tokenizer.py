"""Tokenizers against the tokenizers library, and the refusal of what is damaged."""

from __future__ import annotations

import json
import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from demo_model import demo_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from text_models import tiny_metadata, write_demo_directory, write_sentencepiece_directory
from tokenizers import Tokenizer as Library

from lmdeploy.errors import ModelError, RequestError
from lmdeploy.text.gguf_vocabulary import backend_from_gguf
from lmdeploy.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return load_tokenizer(demo_gguf())


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_directory(tmp_path_factory.mktemp("tokenizer") / "demo")


@pytest.fixture(scope="module")
def library(directory: Path) -> Library:
    return Library.from_file(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_sentencepiece_directory(tmp_path_factory.mktemp("tokenizer") / "sp"))


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_gguf_and_directory_ids_equal_the_library(
    text: str, demo: Tokenizer, library: Library, directory: Path
) -> None:
    expected = library.encode(text, add_special_tokens=False).ids
    assert demo.encode(text, parse_special=True) == expected
    assert b"".join(demo.token_bytes(i) for i in expected) == spelled(text, demo)


def spelled(text: str, tokenizer: Tokenizer) -> bytes:
    """The bytes of `text` without the few that this vocabulary has no token for (control characters, planes
    beyond the first two)."""
    return bytes(byte for byte in text.encode() if byte in single_bytes(tokenizer))


@lru_cache(maxsize=4)
def single_bytes(tokenizer: Tokenizer) -> frozenset[int]:
    tokens = map(tokenizer.token_bytes, range(tokenizer.vocab_size))
    return frozenset(token[0] for token in tokens if len(token) == 1)


def test_long_text_gives_the_same_ids(demo: Tokenizer, library: Library) -> None:
    text = "The quick brown fox, 42 times. " * 400
    assert demo.encode(text) == library.encode(text).ids


def test_pre_tokenizers_follow_the_models_own_files() -> None:
    """Cuts stated by hand from the published patterns: digits by one, by three, and with a leading blank."""
    cuts = {
        "smollm": ["ab", "Ġ", "1", "2", "3", "4", "Ġcd", "Ċ", "Ċ", "e"],
        "llama-bpe": ["ab", "Ġ", "123", "4", "Ġcd", "ĊĊ", "e"],
        "qwen2": ["ab", "Ġ", "1", "2", "3", "4", "Ġcd", "ĊĊ", "e"],
        "gpt-2": ["ab", "Ġ1234", "Ġcd", "Ċ", "Ċ", "e"],
    }
    for kind, expected in cuts.items():
        backend = backend_from_gguf(tiny_metadata(pre=kind), "x.gguf")
        assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("ab 1234 cd\n\ne")] == expected


def gguf_tokenizer(**changes: Any) -> Tokenizer:
    metadata = tiny_metadata(**changes)
    return Tokenizer(backend_from_gguf(metadata, "x.gguf"), "x.gguf", bos_id=0, eos_ids=[1])


def test_begin_marker_is_added_once() -> None:
    tokenizer = gguf_tokenizer()
    ids = tokenizer.encode("ab", add_special_tokens=True)
    assert ids == [0, tokenizer.id_of("ab")]
    assert tokenizer.encode("<|begin|>ab", add_special_tokens=True, parse_special=True) == ids
    assert gguf_tokenizer(add_bos_token=False).encode("ab", add_special_tokens=True) == ids[1:]


def test_control_tokens_are_parsed_only_when_asked() -> None:
    tokenizer = gguf_tokenizer()
    assert tokenizer.encode("<|end|>", parse_special=True) == [1]
    plain = tokenizer.encode("<|end|>ab<tool>")
    assert 1 not in plain
    assert plain[-1] == 2, "a token that is no control token is part of the vocabulary's text"
    assert tokenizer.decode(plain) == "<|end|>ab<tool>"
    assert tokenizer.special_ids == {0, 1}


def test_plain_encoding_equals_the_library_with_control_tokens_off(demo: Tokenizer, directory: Path) -> None:
    plain = Library.from_file(str(directory / "tokenizer.json"))
    plain.encode_special_tokens = True
    for text in ("<|im_end|>", "a <|im_start|>system\nb<|endoftext|>", "<|im_end|<|im_end|>>"):
        assert demo.encode(text) == plain.encode(text, add_special_tokens=False).ids
        assert not demo.special_ids & set(demo.encode(text))


def test_preparing_leaves_nothing_to_make_later(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, prepared = gguf_tokenizer(), gguf_tokenizer()
    prepared.prepare()
    expected = tokenizer.encode("<|end|>ab")
    monkeypatch.setattr("lmdeploy.text.tokenizer.json.loads", None)
    assert prepared.encode("<|end|>ab") == expected


def test_plain_encoding_for_sentencepiece_vocabularies(pieces: Tokenizer) -> None:
    """The pieces <s> and </s> are in the vocabulary itself, yet text never becomes one of them."""
    ids = pieces.encode("</s> a<s>")
    assert not pieces.special_ids & set(ids)
    assert pieces.decode(ids) == "</s> a<s>"


def test_token_bytes_are_exact(demo: Tokenizer, pieces: Tokenizer) -> None:
    text = "漢字 👩‍👩‍👧\n\x00\x7f\xad"
    assert b"".join(demo.token_bytes(i) for i in demo.encode(text)) == text.encode()
    assert {*range(0x20, 0x7F), *range(0x80, 0xC0)} <= single_bytes(demo)
    assert pieces.token_bytes(3 + 0xE6) == b"\xe6"
    assert pieces.token_bytes(pieces.id_of("▁two") or -1) == b" two"
    assert demo.token_bytes(2) == b"<|im_end|>"
    assert demo.token_bytes(demo.vocab_size + 5) == b""
    with pytest.raises(IndexError):
        demo.token_bytes(-1)


def test_end_of_turn_ids_are_the_union(directory: Path, tmp_path: Path) -> None:
    """The tokenizer names one id, generation_config others."""
    write_demo_directory(tmp_path)
    assert load_tokenizer(tmp_path).eos_ids == {2}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    assert load_tokenizer(tmp_path).eos_ids == {0, 2}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7, 9]}))
    assert load_tokenizer(tmp_path).eos_ids == {0, 2, 7, 9}


def test_tokens_that_only_the_configuration_names_are_added(tmp_path: Path) -> None:
    write_demo_directory(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    extra = {"49152": {"content": "<|new|>", "special": True, "normalized": False}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens_decoder": extra}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.id_of("<|new|>") == 49152
    assert tokenizer.encode("a<|new|>", parse_special=True)[-1] == 49152
    assert 49152 in tokenizer.special_ids
    assert tokenizer.vocab_size == 49153


def test_vocabulary_must_fit_the_embedding(demo: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lmdeploy"):
        demo.check_vocabulary(49152)
        assert not caplog.records
        demo.check_vocabulary(50000)
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == [
        "the tokenizer has 49152 ids, the model's embedding 50000 rows; the last 848 stand for no text"
    ]
    with pytest.raises(ModelError, match="ids up to 49151, but the model's embedding has only 49151 rows"):
        demo.check_vocabulary(49151)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "bert"}, "tokenizer kind 'bert' is not supported"),
        ({"pre": "viking"}, "pre-tokenizer 'viking' is not supported"),
        ({"model": "llama"}, "scores does not have one entry per token"),
        ({"merges": ["a b", "ab"]}, "holds 'ab', which is no pair"),
        ({"merges": ["a zz"]}, "do not fit together"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"token_type": [1]}, "one entry per token"),
        ({"bos_token_id": 1 << 20}, "but there are"),
        ({"bos_token_id": True, "add_bos_token": True}, "bos_token_id is True, but there are"),
        ({"token_type": [1, 99, *[1] * 237]}, "token_type is 99 for token 1; 0 to 6 is expected"),
        ({"add_bos_token": "false"}, "tokenizer.ggml.add_bos_token is 'false'; true or false is expected"),
        ({"add_eos_token": 1}, "tokenizer.ggml.add_eos_token is 1; true or false is expected"),
    ],
)
def test_damaged_gguf_vocabularies_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        backend_from_gguf(tiny_metadata(**changes), "x.gguf")


def test_two_tokens_of_one_id_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_demo_directory(tmp_path)
    description = json.loads((tmp_path / "tokenizer.json").read_text())
    description["model"]["vocab"]["another"] = description["model"]["vocab"]["Ġthe"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    load_tokenizer(tmp_path)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "tokenizer.json: tokens 'another' and 'Ġthe' have the same id, " in line


def test_an_end_that_is_no_token_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_demo_directory(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": "<nothing>"}))
    assert load_tokenizer(tmp_path).eos_ids == frozenset()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == f"{tmp_path}: eos_token is '<nothing>', which is no token; it is left out"


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"model": 3}', "\x00"])
def test_damaged_tokenizer_files_are_one_line(damage: str, tmp_path: Path) -> None:
    write_demo_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text(damage)
    with pytest.raises(ModelError, match=r"tokenizer\.json: not a sound tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_tokenizer_files_are_named(tmp_path: Path) -> None:
    write_demo_directory(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\n")
    with pytest.raises(ModelError, match=r"tokenizer\.model: not a sound SentencePiece model"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("text", ["\ud800", "ab\udcff", "<|im_end|>\ud800", "x" * 5000 + "\ud800"])
def test_text_that_is_none_is_refused_before_it_becomes_ids(text: str, demo: Tokenizer) -> None:
    for encode in (demo.encode, demo.encode_marked):
        with pytest.raises(RequestError, match=f"character {len(text)} is the lone surrogate"):
            encode(text)
