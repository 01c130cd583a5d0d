"""Tokenizer sources made by hand: what is read, what is kept, what the files beside add, what is refused."""

from __future__ import annotations

import base64
import json
import logging
import os
import struct
from pathlib import Path
from random import Random
from typing import Any

import pytest

from lmdeploy.errors import ModelError
from lmdeploy.text.conversion_cache import cache_folder
from lmdeploy.text.tokenizer import Tokenizer, load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder()


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = b""
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def block(field: int, data: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(data)) + data


def sentencepiece(
    pieces: list[tuple[str, float, int]], kind: int = 2, trainer: bytes = b"", normalizer: bytes = b""
) -> bytes:
    """A model file by the public proto: ModelProto with its pieces, trainer and normaliser settings."""
    data = b"".join(
        block(
            1, block(1, text.encode()) + varint(2 << 3 | 5) + struct.pack("<f", score) + number(3, piece_kind)
        )
        for text, score, piece_kind in pieces
    )
    return data + block(2, number(3, kind) + trainer) + block(3, number(4, 0) + normalizer)


PIECES = [
    ("<unk>", 0.0, UNKNOWN),
    ("<s>", 0.0, CONTROL),
    ("</s>", 0.0, CONTROL),
    *((f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)),
    ("▁a", -1.0, NORMAL),
    ("ab", -2.0, NORMAL),
    ("[FREE_1]", -3.0, NORMAL),
    ("▁", -4.0, NORMAL),
    ("a", -5.0, NORMAL),
    ("b", -6.0, NORMAL),
]
SPACE_A, AB, FREE, SPACE, A, B = range(259, 265)


def write(folder: Path, files: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {"config.json": {}, **files}.items():
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (folder / name).write_bytes(data)
    return folder


def pieces_tokenizer(folder: Path, **files: Any) -> Tokenizer:
    named = {name.replace("_json", ".json"): content for name, content in files.items()}
    return load_tokenizer(write(folder, {"tokenizer.model": sentencepiece(PIECES), **named}))


def test_better_scores_merge_first_and_bytes_stand_in(tmp_path: Path) -> None:
    tokenizer = pieces_tokenizer(tmp_path / "m")
    assert tokenizer.encode("ab") == [SPACE_A, B]
    assert tokenizer.encode("bab") == [SPACE, B, AB]
    assert tokenizer.encode("é") == [SPACE, 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.encode("a", add_special_tokens=True) == [1, SPACE_A]
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.special_ids) == (1, {2}, {0, 1, 2})


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({}, [SPACE_A, 2, SPACE_A]),
        ({"legacy": False}, [SPACE_A, 2, A]),
        ({"add_prefix_space": False}, [A, 2, A]),
    ],
)
def test_the_blank_in_front_follows_the_settings(
    config: dict[str, Any], ids: list[int], tmp_path: Path
) -> None:
    tokenizer = pieces_tokenizer(tmp_path / "m", tokenizer_config_json=config)
    assert tokenizer.encode("a</s>a", parse_special=True) == ids
    assert tokenizer.decode([A, A]) == "aa"
    assert tokenizer.decode([SPACE_A]) == ("a" if ids[0] == SPACE_A else " a")


def test_added_tokens_rename_free_pieces_and_follow_the_vocabulary(tmp_path: Path) -> None:
    added = {
        str(FREE): {"content": "<|start|>", "special": True},
        "265": {"content": "<|end|>", "special": True},
        "266": {"content": "<tool>", "special": False, "normalized": False},
    }
    tokenizer = pieces_tokenizer(tmp_path / "m", tokenizer_config_json={"added_tokens_decoder": added})
    assert tokenizer.encode("<|start|>a<|end|>", parse_special=True) == [FREE, SPACE_A, 265]
    assert tokenizer.id_of("[FREE_1]") is None
    assert tokenizer.special_ids == {0, 1, 2, FREE, 265}
    assert tokenizer.encode("<tool>")[-1] == 266
    assert FREE not in tokenizer.encode("<|start|>")


def test_added_tokens_in_older_forms(tmp_path: Path) -> None:
    """added_tokens.json gives ids, special_tokens_map.json says which are control tokens."""
    tokenizer = pieces_tokenizer(
        tmp_path / "m",
        added_tokens_json={"<|end|>": 265, "<tool>": 266},
        special_tokens_map_json={
            "eos_token": {"content": "<|end|>"},
            "additional_special_tokens": ["[FREE_1]"],
        },
    )
    assert (tokenizer.eos_ids, tokenizer.special_ids) == ({265}, {0, 1, 2, FREE, 265})
    assert tokenizer.named_tokens["eos_token"] == "<|end|>"
    assert tokenizer.named_tokens["bos_token"] == "<s>"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"added_tokens_json": {"<|end|>": 300}}, "'<|end|>' should have id 300, but .* has 265"),
        ({"added_tokens_json": {"<|end|>": "x"}}, r"added_tokens\.json: '<\|end\|>' has no id"),
        ({"tokenizer_config_json": {"added_tokens_decoder": {"x": "y"}}}, "holds 'x', which is no id"),
    ],
)
def test_added_tokens_that_do_not_fit_are_named(files: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words.replace("'<|end|>' s", r"'<\|end\|>' s")):
        pieces_tokenizer(tmp_path / "m", **files)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a sound SentencePiece model"),
        (b"\n\xff", "not a sound SentencePiece model"),
        (sentencepiece(PIECES)[:-3], "not a sound SentencePiece model"),
        (b"\x0b\x0c", "not a sound SentencePiece model"),
        (sentencepiece(PIECES, kind=4), "SentencePiece kind 'char' is not supported"),
        (sentencepiece(PIECES, trainer=number(24, 1)), "keep blanks otherwise"),
        (sentencepiece([*PIECES, ("a", -9.0, NORMAL)]), "holds a piece twice"),
        (sentencepiece([*PIECES, ("c", float("nan"), NORMAL)]), "a score that is no finite number"),
    ],
)
def test_damaged_sentencepiece_files_are_one_line(data: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        load_tokenizer(write(tmp_path / "m", {"tokenizer.model": data}))
    assert "tokenizer.model" in str(caught.value)
    assert "\n" not in str(caught.value)


BYTES = [bytes([byte]) for byte in range(256)]


def ranks(tokens: list[bytes], end: bytes = b"\n") -> bytes:
    return b"".join(base64.b64encode(token) + b" %d" % i + end for i, token in enumerate(tokens))


def test_rank_files_need_their_control_tokens(tmp_path: Path) -> None:
    data = ranks([*BYTES, b"ab", b" ab"])
    with pytest.raises(ModelError, match="258 ranks and no control tokens"):
        load_tokenizer(write(tmp_path / "m", {"tokenizer.model": data}))
    config = {
        "added_tokens_decoder": {"258": {"content": "<|s|>", "special": True}, "259": {"content": "<|e|>"}},
        "bos_token": "<|s|>",
        "eos_token": "<|e|>",
        "add_bos_token": True,
    }
    tokenizer = load_tokenizer(
        write(tmp_path / "m", {"tokenizer.model": data, "tokenizer_config.json": config})
    )
    assert tokenizer.encode("ab ab", add_special_tokens=True) == [258, 256, 257]
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (258, {259})
    assert tokenizer.encode("<|e|>", parse_special=True) == [259]


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("other.tiktoken", ranks(BYTES), "how other.tiktoken cuts a text is not known"),
        ("qwen.tiktoken", b"x", "line 1 is no token with its rank"),
        ("qwen.tiktoken", ranks(BYTES) + b"YWI= 900\n", r"ranks are not 0, 1, 2"),
        ("qwen.tiktoken", ranks(BYTES[1:]), "does not hold all single bytes"),
        ("qwen.tiktoken", ranks([*BYTES, b"<|im_end|>"]), r"control tokens <\|im_end\|> and the vocabulary"),
        ("tokenizer.model", b"YQ== 0\nzz\n", "line 2 is no token with its rank"),
    ],
)
def test_damaged_rank_files_are_one_line(name: str, data: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        load_tokenizer(write(tmp_path / "m", {name: data}))
    assert "\n" not in str(caught.value)


def tekken(tokens: list[bytes], special: Any = None, **config: Any) -> dict[str, Any]:
    settings = {"pattern": r"\S+|\s+", "default_vocab_size": len(tokens) + 4, "default_num_special_tokens": 4}
    entries = [{"rank": i, "token_bytes": base64.b64encode(t).decode()} for i, t in enumerate(tokens)]
    content = {"config": {**settings, **config}, "vocab": entries}
    return content if special is None else {**content, "special_tokens": special}


def test_tekken_ids_follow_the_control_tokens(tmp_path: Path) -> None:
    names = ["<unk>", "<s>", "</s>"]
    special = [{"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(names)]
    folder = write(tmp_path / "m", {"tekken.json": tekken([*BYTES, b"ab", b"abab"], special)})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("abab ab", add_special_tokens=True) == [1, 4 + 257, 4 + 32, 4 + 256]
    assert tokenizer.encode("abab</s><SPECIAL_3>", parse_special=True) == [4 + 257, 2, 3]
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, {2}, 262)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "not a sound tekken vocabulary"),
        (tekken(BYTES, default_vocab_size=400), "ranks are not those of 400 tokens with 4 control tokens"),
        (tekken(BYTES, [{"rank": 9, "token_str": "x"}]), "ranks are not those"),
        (tekken(BYTES, [{"token_str": "x"}]), "not a sound tekken vocabulary"),
        (tekken(BYTES, default_vocab_size=10**12), "ranks are not those of"),
        (tekken(BYTES, [], pattern="(("), "not a sound vocabulary"),
    ],
)
def test_damaged_tekken_files_are_one_line(content: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        load_tokenizer(write(tmp_path / "m", {"tekken.json": content}))
    assert "\n" not in str(caught.value)


def test_conversions_are_kept_by_content(cache: Path, tmp_path: Path) -> None:
    first = pieces_tokenizer(tmp_path / "m")
    kept = list(cache.iterdir())
    assert len(kept) == 1
    assert kept[0].suffix == ".json"
    kept[0].write_text(kept[0].read_text().replace("[FREE_1]", "[FREE_2]"))
    assert pieces_tokenizer(tmp_path / "other").id_of("[FREE_2]") == FREE, "the kept file is what is read"
    kept[0].write_text("damaged")
    assert pieces_tokenizer(tmp_path / "m").encode("ab") == first.encode("ab")
    assert json.loads(kept[0].read_text())
    changed = sentencepiece([*PIECES, ("abab", -0.5, NORMAL)])
    assert load_tokenizer(write(tmp_path / "m", {"tokenizer.model": changed})).encode("babab")[-1] == 265
    assert len(list(cache.iterdir())) == 2


def test_a_cache_that_cannot_be_written_is_a_warning(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.parent.mkdir(parents=True)
    cache.parent.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, "lmdeploy"):
        assert pieces_tokenizer(tmp_path / "m").encode("ab") == [SPACE_A, B]
    assert len(caplog.records) == 1
    assert "cannot be written" in caplog.records[0].getMessage()


def damaged(data: bytes, random: Random) -> bytes:
    """A few bytes changed, cut out or put in."""
    changed = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at, way = random.randrange(len(changed)), random.random()
        if way < 0.6:
            changed[at] = random.randrange(256)
        elif way < 0.8:
            del changed[at : at + random.randint(1, 20)]
        else:
            changed[at:at] = random.randbytes(3)
    return bytes(changed)


@pytest.mark.parametrize("name", ["tokenizer.model", "qwen.tiktoken", "tekken.json"])
def test_random_damage_never_is_a_traceback(name: str, tmp_path: Path) -> None:
    sound = {
        "tokenizer.model": sentencepiece(PIECES),
        "qwen.tiktoken": ranks([*BYTES, b"ab"]),
        "tekken.json": json.dumps(tekken([*BYTES, b"ab"])).encode(),
    }[name]
    random, refusals = Random(7), []
    for _ in range(200):
        try:
            tokenizer = load_tokenizer(write(tmp_path / "m", {name: damaged(sound, random)}))
            tokenizer.decode(tokenizer.encode("ab <s> é", add_special_tokens=True, parse_special=True))
        except ModelError as error:
            refusals.append(str(error))
    assert len(refusals) > 20
    assert not [line for line in refusals if "\n" in line]


@pytest.mark.parametrize("value", ["x", {}, -1, 10**6, 1.5, float("nan"), True, [1, "x"], [[1]]])
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_ends_that_are_no_ids_are_named(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="eos_token_id is") as caught:
        pieces_tokenizer(tmp_path / "m", **{name.replace(".json", "_json"): {"eos_token_id": value}})
    assert str(tmp_path / "m" / name) in caught.value.message
    assert "\n" not in caught.value.message


def test_ends_may_be_rows_that_the_tokenizer_does_not_name(tmp_path: Path) -> None:
    """The embedding is often padded beyond the vocabulary."""
    config = {"eos_token_id": [1, 500], "vocab_size": 512}
    assert 1 in pieces_tokenizer(tmp_path / "m", config_json=config).eos_ids


def _dangling(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize("make", [_dangling, Path.mkdir, os.mkfifo], ids=["link", "directory", "pipe"])
@pytest.mark.parametrize(
    "name",
    ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json"],
)
def test_what_is_no_file_is_not_taken_as_absent(name: str, make: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", {"tokenizer.model": sentencepiece(PIECES)})
    make(folder / name)
    with pytest.raises(ModelError, match=f"{name}: is "):
        load_tokenizer(folder)


@pytest.mark.parametrize("name", ["tokenizer_config_json", "special_tokens_map_json"])
def test_half_a_character_in_a_file(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"not valid text: .* lone surrogate U\+D800"):
        pieces_tokenizer(tmp_path / "m", **{name: {"bos_token": "\ud800"}})
    pieces_tokenizer(tmp_path / "whole", **{name: {"bos_token": "\U0001f600"}})


def test_a_switch_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer_config.json: add_bos_token is 'yes'; true or false"):
        pieces_tokenizer(tmp_path / "m", tokenizer_config_json={"add_bos_token": "yes"})


@pytest.mark.parametrize("file", ["tokenizer_config", "special_tokens_map"])
@pytest.mark.parametrize("token", ["bos_token", "eos_token", "pad_token"])
@pytest.mark.parametrize("value", [1, False, ["<s>"], {"content": 2}, {}])
def test_a_token_that_is_none_is_named(file: str, token: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        pieces_tokenizer(tmp_path / "m", **{f"{file}_json": {token: value}})
    assert f"{file}.json: {token} is {value!r}; a text, an object" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_token_is_a_text_or_an_object_and_none_is_null_or_empty(tmp_path: Path) -> None:
    for bos in (None, ""):
        tokenizer = pieces_tokenizer(tmp_path / "none", tokenizer_config_json={"bos_token": bos})
        assert tokenizer.named_tokens["bos_token"] == "<s>"  # that of the SentencePiece file
    for bos in ("</s>", {"content": "</s>"}):
        tokenizer = pieces_tokenizer(tmp_path / "some", special_tokens_map_json={"bos_token": bos})
        assert tokenizer.named_tokens["bos_token"] == "</s>"
