"""Local files -> documents: .txt, .jsonl, .json and .parquet, plain or .gz or .zst, or a folder of them.

A text file is one document; each record of the others is one. Reading stops after `room` characters, so that
a file of any size can be given. What was left out is counted in `Notes`.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from lmdeploy.errors import ConfigError
from lmdeploy.lite.data.records import EXPECTED, FIELDS, Document, document, field_names, is_message

KINDS = (".txt", ".text", ".md", ".jsonl", ".ndjson", ".json", ".parquet")
_COMPRESSED = (".gz", ".zst")
_LONGEST_LINE = 32 << 20  # characters of a JSON line; a longer one is no record that anybody trains on
_CHUNK = 1 << 20
_MOST_REPLACED = 1e-3  # of the characters of a text; more are no slips but another encoding
_BOMS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass(slots=True)
class Notes:
    """What reading left out. cut: files of which only the beginning was read."""

    skipped: Counter[str] = field(default_factory=Counter)
    fields: set[str] = field(default_factory=set)
    kept: int = 0
    cut: int = 0

    def warnings(self, name: str) -> list[str]:
        return [f"{name}: {count} {what}" for what, count in sorted(self.skipped.items())]


def is_data_file(name: str) -> bool:
    return _kind(name) in KINDS and not Path(name).name.startswith(".")


def read(path: Path, room: int, notes: Notes) -> list[Document]:
    """All documents of a file or folder, at most about `room` characters. ConfigError when there are none."""
    files = _files(path)
    out = read_files(files, room, notes)
    if not out:
        raise ConfigError(nothing(path, notes))
    return out


def read_files(files: list[Path], room: int, notes: Notes) -> list[Document]:
    """Of many files each gets an equal part of the room, small ones first, so that nothing of it is lost."""
    out: list[Document] = []
    ordered = sorted(files, key=lambda file: (file.stat().st_size, file.name))
    for i, file in enumerate(ordered):
        part = room // (len(ordered) - i)
        found = list(_limited(_records_of(file, notes), part, notes))
        room -= sum(map(characters, found))
        out += found
    return out


def characters(text: Document) -> int:
    return len(text) if isinstance(text, str) else sum(len(message["content"]) for message in text)


def _files(path: Path) -> list[Path]:
    try:
        if not path.is_dir():
            path.stat()
            return [path]
        files = [file for file in sorted(path.rglob("*")) if is_data_file(file.name) and file.is_file()]
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}.") from None
    if not files:
        raise ConfigError(f"{path}: holds no file of a known kind ({', '.join(KINDS)}, also with .gz).")
    return files


def nothing(path: Path, notes: Notes) -> str:
    if notes.fields:
        names = ", ".join(sorted(notes.fields)[:20])
        return f"{path}: no record has a field with text (looked for: {EXPECTED}); its records have: {names}."
    why = "; ".join(f"{count} {what}" for what, count in sorted(notes.skipped.items()))
    return f"{path}: there is no text in it{f' ({why})' if why else ''}."


def _limited(found: Iterable[Document], room: int, notes: Notes) -> Iterator[Document]:
    for text in found:
        if room <= 0:
            notes.cut += 1
            return
        if isinstance(text, str) and len(text) > room + _CHUNK:
            text = text[: room + _CHUNK]
        room -= characters(text)
        notes.kept += 1
        yield text


def _kind(name: str) -> str:
    parts = Path(name.lower()).suffixes
    return parts[-2] if len(parts) > 1 and parts[-1] in _COMPRESSED else parts[-1] if parts else ""


def _records_of(file: Path, notes: Notes) -> Iterator[Document]:
    kind = _kind(file.name)
    if kind == ".parquet":
        yield from _documents(_parquet(file, notes), notes)
        return
    try:
        with _open(file) as stream:
            if kind in (".jsonl", ".ndjson", ".json"):
                yield from _documents(_json(stream, file, notes), notes)
            else:
                yield from _plain(stream, file, notes)
    except (OSError, EOFError, zlib.error, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise ConfigError(f"{file}: cannot be read: {reason}.") from None


def _open(file: Path) -> TextIO:
    """The file as text; a byte order mark says which encoding and is none of the text, without one: UTF-8.

    Bytes that are no UTF-8 become lone surrogates, which `_repaired` counts.
    """
    with _bytes(file) as stream:
        start = stream.read(4)
    encoding = next((name for mark, name in _BOMS if start.startswith(mark)), "utf-8-sig")
    return io.TextIOWrapper(
        _bytes(file), encoding, errors="surrogateescape" if "8" in encoding else "replace"
    )


def _bytes(file: Path) -> io.BufferedReader:
    if file.suffix.lower() == ".gz":
        return io.BufferedReader(gzip.open(file))
    if file.suffix.lower() == ".zst":
        return io.BufferedReader(_arrow().input_stream(str(file), compression="zstd"))
    return file.open("rb")


def _plain(stream: TextIO, file: Path, notes: Notes) -> Iterator[Document]:
    """Pieces of about a million characters, each ending with a line where there is one."""
    while chunk := stream.read(_CHUNK):
        chunk += stream.readline(_CHUNK)
        text = _repaired(chunk, file, notes)
        if text.strip():
            yield text


def _repaired(text: str, file: Path, notes: Notes) -> str:
    try:
        text.encode()
        return text
    except UnicodeEncodeError as error:
        wrong = sum("\ud800" <= c <= "\udfff" for c in text)
        if wrong > _MOST_REPLACED * len(text) + 4:
            byte = ord(text[error.start]) - 0xDC00
            raise ConfigError(
                f"{file}: not UTF-8 text (byte 0x{byte & 0xFF:02x} at character {error.start + 1});"
                " convert it, for example: iconv -f GB18030 -t UTF-8."
            ) from None
    notes.skipped["bytes that are no UTF-8 were replaced"] += wrong
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _json(stream: TextIO, file: Path, notes: Notes) -> Iterator[Any]:
    """Records of JSON lines, or of one array or object that fills the file."""
    number, first_fault, good = 0, "", 0
    while line := stream.readline(_LONGEST_LINE):
        number += 1
        if len(line) == _LONGEST_LINE:
            _skip_line(stream)
            notes.skipped[f"lines of more than {_LONGEST_LINE >> 20} million characters were skipped"] += 1
            continue
        if not line.strip():
            continue
        try:
            value = json.loads(_repaired(line, file, notes))
        except (ValueError, RecursionError) as error:
            if number == 1 and line.lstrip()[0] in "[{":
                yield from _whole(line + stream.read(_LONGEST_LINE), file)
                return
            first_fault = first_fault or f"line {number}: {str(error).splitlines()[0]}"
            notes.skipped["lines that are no JSON were skipped"] += 1
            continue
        good += 1
        yield from _rows(value)
    if first_fault and not good:
        raise ConfigError(f"{file}: no JSON lines: {first_fault}.")


def _skip_line(stream: TextIO) -> None:
    while (rest := stream.readline(_CHUNK)) and not rest.endswith("\n"):
        pass


def _whole(text: str, file: Path) -> Iterator[Any]:
    """One JSON value over several lines, or else JSON lines whose first is damaged."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{file}: not JSON, nor JSON lines: {str(error).splitlines()[0].rstrip('.')}."
        ) from None
    yield from _rows(value)


def _rows(value: Any) -> Iterator[Any]:
    """The records of an array; of an object, the record that it is, or those of the list in it."""
    if isinstance(value, list) and value and not all(map(is_message, value)):
        yield from value
        return
    if isinstance(value, dict) and document(value) is None:
        lists = [
            x
            for x in value.values()
            if isinstance(x, list) and x and isinstance(x[0], dict) and not is_message(x[0])
        ]
        if len(lists) == 1:
            yield from lists[0]
            return
    yield value


def _documents(records: Iterable[Any], notes: Notes) -> Iterator[Document]:
    unusable: set[str] = set()
    for record in records:
        told = notes.skipped.total()
        found = document(record, notes.skipped)
        if found is not None:
            yield found
            continue
        if notes.skipped.total() > told:
            continue
        empty = isinstance(record, dict) and any(name in record for name in FIELDS)
        what = (
            "records with empty text were skipped"
            if empty or record == ""
            else "records without a field of text were skipped"
        )
        notes.skipped[what] += 1
        if not empty and record != "":
            unusable.update(field_names(record))
    if unusable:
        notes.fields |= unusable


def _parquet(file: Path, notes: Notes) -> Iterator[dict[str, Any]]:
    """Only the columns that are looked for are read."""
    arrow = _arrow()
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(str(file))
        names = [name for name in table.schema_arrow.names if name in FIELDS]
        if not names:
            notes.fields |= set(table.schema_arrow.names)
            notes.skipped["records without a field of text were skipped"] += table.metadata.num_rows
            return
        for batch in table.iter_batches(batch_size=256, columns=names):
            yield from batch.to_pylist()
    except (arrow.ArrowException, OSError) as error:
        raise ConfigError(
            f"{file}: not a readable Parquet file: {str(error).splitlines()[0].rstrip('.')}."
        ) from None


def _arrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise ConfigError(
            ".parquet and .zst files need pyarrow: run `pip install lmdeploy[lite]`, or give .jsonl or .txt."
        ) from None
    return pyarrow
