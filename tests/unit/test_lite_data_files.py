"""Local files of every kind, whole and damaged."""

from __future__ import annotations

import codecs
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from lmdeploy.errors import ConfigError
from lmdeploy.lite.data.files import Notes, read
from lmdeploy.lite.data.records import Document, document

ROOM = 1 << 22


def texts(path: Path, room: int = ROOM) -> tuple[list[Document], list[str]]:
    notes = Notes()
    return read(path, room, notes), notes.warnings("x")


def lines(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
SHAREGPT = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"text": "a b"}, "a b"),
        ({"id": 1, "content": "a b"}, "a b"),
        ({"sentence": "a b"}, "a b"),
        ({"text": "", "content": "a b"}, "a b"),
        ("a b", "a b"),
        ({"messages": CHAT}, CHAT),
        ({"conversations": SHAREGPT}, CHAT),
        ({"conversations": CHAT, "text": "not this"}, CHAT),
        (CHAT, CHAT),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}, CHAT[1]]}, CHAT),
        ({"question": "2 + 2?", "answer": "4"}, CHAT),
        ({"instruction": "2 + 2?", "input": "", "output": "4"}, CHAT),
        ({"prompt": "2 + 2?", "completion": "4"}, CHAT),
        ({"prompt": "2 + 2?"}, "2 + 2?"),
        ({"text": "\ud83d\ude00 ok"}, "😀 ok"),
        ({"text": "\ud83d ok"}, "\ufffd ok"),
        ({"title": "a"}, None),
        ({"text": None}, None),
        ({"messages": [{"role": 1, "content": "x"}]}, None),
        ({"messages": "x"}, None),
        (7, None),
    ],
)
def test_a_record_becomes_a_document(record: Any, expected: Document | None) -> None:
    assert document(record) == expected


IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
TEXT = {"type": "text", "text": "2 + 2?"}


def said_by(content: Any, role: str = "user") -> list[Any]:
    return [{"role": role, "content": content}, CHAT[1]]


@pytest.mark.parametrize(
    ("messages", "expected", "said"),
    [
        (said_by([TEXT, IMAGE]), CHAT, "messages lost what is no text (parts: 'image_url')"),
        (said_by(["2 + 2?", 7]), CHAT, "messages lost what is no text (parts: 'of no type')"),
        (said_by(["2 + 2?"]), CHAT, ""),
        (said_by([IMAGE]), None, "with a message without text (parts: 'image_url') were skipped"),
        (said_by(None), None, "conversations with a message without text were skipped"),
        (said_by("2 + 2?", "wizard"), None, "with an unknown role ('wizard') were skipped"),
    ],
)
def test_what_conversations_lose_is_counted(
    tmp_path: Path, messages: Any, expected: Document | None, said: str
) -> None:
    """Images and roles that no template here is asked to render."""
    path = lines(tmp_path / "a.jsonl", {"messages": messages}, {"messages": messages}, {"messages": CHAT})
    found, warnings = texts(path)
    assert found == [*([] if expected is None else [expected] * 2), CHAT]
    assert [warning.startswith("x: 2 ") and said in warning for warning in warnings] == [True] * bool(said)
    if expected is None:
        with pytest.raises(ConfigError, match="there is no text in it") as error:
            texts(lines(path, {"messages": messages}))
        assert said in str(error.value)


def test_text_files(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for encoded in (
        "one\ntwo 三\n".encode(),
        codecs.BOM_UTF8 + "one\ntwo 三\n".encode(),
        "one\ntwo 三\n".encode("utf-16"),
        codecs.BOM_UTF16_BE + "one\ntwo 三\n".encode("utf-16-be"),
        "one\ntwo 三\n".encode("utf-32"),
        b"one\r\ntwo \xe4\xb8\x89\r\n",
    ):
        path.write_bytes(encoded)
        assert texts(path) == (["one\ntwo 三\n"], [])
    with gzip.open(tmp_path / "a.txt.gz", "wb") as file:
        file.write("zwölf".encode())
    assert texts(tmp_path / "a.txt.gz") == (["zwölf"], [])


def test_wrong_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"good text " * 1000 + b"\xff" + b"good text " * 1000)
    found, warnings = texts(path)
    assert "\ufffd" in str(found[0]) and warnings == ["x: 1 bytes that are no UTF-8 were replaced"]
    path.write_bytes("中文的文字".encode("gb18030") * 100)
    with pytest.raises(ConfigError, match=r"a\.txt: not UTF-8 text \(byte 0xd6 at character 1\).*iconv"):
        texts(path)


def test_json_lines(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"text": "one"}, {"messages": CHAT}, {"label": 3}, {"text": " "})
    path.write_text(path.read_text() + "\n\nnot json\n{\n")
    found, warnings = texts(path)
    assert found == ["one", CHAT]
    assert warnings == [
        "x: 2 lines that are no JSON were skipped",
        "x: 1 records with empty text were skipped",
        "x: 1 records without a field of text were skipped",
    ]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("shape", ["array", "object"])
def test_json_of_one_value(tmp_path: Path, shape: str, indent: int | None) -> None:
    rows = [{"text": "one"}, {"conversations": SHAREGPT}]
    (tmp_path / "a.json").write_text(json.dumps(rows if shape == "array" else {"data": rows}, indent=indent))
    assert texts(tmp_path / "a.json") == (["one", CHAT], [])


def test_a_huge_line_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmdeploy.lite.data.files._LONGEST_LINE", 2000)
    path = lines(tmp_path / "a.jsonl", {"text": "one"}, {"text": "x" * 9000}, {"text": "two"})
    found, warnings = texts(path)
    assert found == ["one", "two"] and "were skipped" in warnings[0]


def test_reading_stops_when_there_is_enough(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", *({"text": "x" * 100} for _ in range(100)))
    assert len(texts(path, room=1000)[0]) == 10
    (tmp_path / "b.txt").write_text("line\n" * 2_000_000)
    found = texts(tmp_path / "b.txt", room=1 << 21)[0]
    assert 1 << 21 <= sum(map(len, found)) < 4 << 20


def test_a_folder(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    lines(tmp_path / "deep/a.jsonl", {"text": "one"})
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "c.png").write_bytes(b"\x89PNG")
    (tmp_path / ".d.txt").write_text("hidden")
    assert sorted(map(str, texts(tmp_path)[0])) == ["one", "two"]
    # what small files do not use of their part is left for the large one
    (tmp_path / "b.txt").write_text("word " * 1_000_000)
    assert sum(len(x) for x in texts(tmp_path, room=3 << 20)[0]) > 3 << 20


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"", "there is no text in it"),
        ("a.txt", b" \n\n", "there is no text in it"),
        ("a.jsonl", b"", "there is no text in it"),
        ("a.jsonl", b'{"text": ""}\n', "1 records with empty text were skipped"),
        ("a.jsonl", b'{"title": "x", "label": 1}\n{"score": 2}', "its records have: label, score, title"),
        ("a.jsonl", b"[1, 2]\n", "its records have: .no fields: int"),
        ("a.jsonl", b"hello\nworld\n", "no JSON lines: line 1"),
        ("a.json", b"{\n", "not JSON, nor JSON lines"),
        ("a.jsonl", b"[" * 100_000, "nor JSON lines"),
        ("a.txt.gz", b"plain", "cannot be read"),
        ("a.txt.gz", gzip.compress(b"text " * 1000, mtime=0)[:30], "cannot be read"),
        ("a.txt", b"\xff\xfeabc", "cannot be read|no text|not UTF"),
    ],
)
def test_damage_is_one_line(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    if name == "a.txt" and content[:2] == b"\xff\xfe":
        assert texts(path)[0]  # an odd number of bytes: the last is lost, the text is there
        return
    with pytest.raises(ConfigError, match=said) as error:
        texts(path)
    assert len(error.value.message.splitlines()) == 1 and str(path) in error.value.message


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no file of a known kind"):
        texts(tmp_path)
