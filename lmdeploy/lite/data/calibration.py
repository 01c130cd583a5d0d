"""Documents of one or several sources -> windows of token ids, as a model would be fed.

A window is `seqlen` tokens and begins with the begin marker where the tokenizer adds one. A document that
fills windows gives windows of its own; what is left of it, and short documents, are joined (a begin marker
between them, or an empty line where there is none) until a window is full. Documents, and the windows of all
sources, come in an order that follows from the seed alone.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lmdeploy.errors import ConfigError, RequestError, shorten
from lmdeploy.lite.data import builtin, files, known
from lmdeploy.lite.data.records import Document
from lmdeploy.lite.data.source import Part, parse_source, path_exists
from lmdeploy.text.chat_template import ChatTemplate
from lmdeploy.text.tokenizer import Tokenizer

_ROOM = 32  # characters read for each token asked: enough to choose from, bounded for any file
_LEAST_ROOM = 1 << 22
_PIECE = 8  # characters a token of the pieces that long documents are cut into


@dataclass(frozen=True, slots=True)
class CalibrationSet:
    """ids: int64 [windows, tokens]. description: what it was made of, for the saved config (JSON values).
    warnings: for the user, one line each."""

    ids: npt.NDArray[np.int64]
    description: dict[str, Any]
    warnings: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """The description in one line."""
        if not self.ids.size:
            return "calibration: none"
        parts = ", ".join(f"{p['name']} {p['windows']}" for p in self.description["parts"])
        windows, tokens = self.ids.shape
        digest = self.description["sha256"][:12]
        return f"calibration: {windows} windows of {tokens} tokens ({parts}), sha256 {digest}"


def calibration_windows(
    source: str | None,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    samples: int,
    seqlen: int,
    seed: int = 0,
    *,
    download_dir: str | None = None,
) -> CalibrationSet:
    """source: as for `--calib-dataset`; None: the built-in mixture. samples 0: no windows.

    With less text than asked for there are fewer windows, and one shorter one if it fills none, with a
    warning that gives the numbers. ConfigError when a source is not there or has no text. download_dir: the
    hub cache.
    """
    if source is not None and not source.strip():
        raise ConfigError("--calib-dataset is empty: name a file, a folder or a known data set")
    check_size(samples, seqlen)
    if not samples:
        return CalibrationSet(np.zeros((0, seqlen), np.int64), {"source": "none", "parts": []})
    room = max(_LEAST_ROOM, samples * seqlen * _ROOM)
    cutter = _Cutter(tokenizer, template, seqlen)
    streams = [_Stream(part, cutter, room, seed, download_dir) for part in _parts(source)]
    warnings = [warning for stream in streams for warning in stream.notes.warnings(stream.part.name)]
    _fill(streams, samples)
    if not any(stream.taken for stream in streams):
        longest = max(streams, key=lambda stream: len(stream.rest()))
        longest.taken.append(longest.rest())
    windows = [window for stream in streams for window in stream.taken]
    _shuffle(windows, seed)
    ids = np.array(windows, np.int64)
    if not ids.size:
        raise ConfigError(f"--calib-dataset {source}: its text gives no tokens.")
    warnings += _shortage(streams, samples, seqlen, ids)
    warnings += cutter.warnings()
    return CalibrationSet(ids, _describe(source, streams, ids, seed), tuple(warnings))


def check_size(samples: int, seqlen: int) -> None:
    """ConfigError for what no text can give."""
    if samples < 0 or seqlen < 8:
        raise ConfigError("--calib-samples must be at least 0 and --calib-seqlen at least 8.")


def _parts(source: str | None) -> tuple[Part, ...]:
    """The built-in mixture stands for its domains, in their shares."""
    out: dict[str, float] = {}
    for part in parse_source(source or builtin.NAME):
        inner = (
            {f"{builtin.NAME}-{d}": s for d, s in builtin.SHARES.items()} if part.name == builtin.NAME else {}
        )
        for name, share in (inner or {part.name: 1.0}).items():
            out[name] = out.get(name, 0.0) + part.weight * share
    return tuple(Part(name, weight) for name, weight in out.items())


def _documents(name: str, room: int, notes: files.Notes, download_dir: str | None) -> list[Document]:
    domain = name.removeprefix(f"{builtin.NAME}-")
    path = Path(os.path.expanduser(name))
    if domain in builtin.DOMAINS and domain != name:
        return builtin.calibration(domain)
    if name in known.SETS and not path_exists(name):
        return known.read(name, room, notes, download_dir)
    if not path_exists(name):
        names = ", ".join((*known.SETS, builtin.NAME, *(f"{builtin.NAME}-{d}" for d in builtin.DOMAINS)))
        raise ConfigError(
            f"--calib-dataset {shorten(name)}: no such file or folder, and not a known name ({names})."
        )
    return files.read(path, room, notes)


class _Stream:
    """The windows of one source, made as they are asked for."""

    def __init__(self, part: Part, cutter: _Cutter, room: int, seed: int, download_dir: str | None) -> None:
        self.part, self.notes = part, files.Notes()
        documents = _documents(part.name, room, self.notes, download_dir)
        self.documents = len(documents)
        self.sha256 = _digest(documents)
        pieces = [piece for text in documents for piece in cutter.pieces(text)]
        _shuffle(pieces, seed)
        self._buffer: list[int] = []
        self._windows = cutter.windows(pieces, self._buffer)
        self.taken: list[list[int]] = []
        self.empty = False

    def take(self, count: int) -> int:
        """Takes up to `count` windows more; how many there were."""
        before = len(self.taken)
        while len(self.taken) - before < count and not self.empty:
            window = next(self._windows, None)
            if window is None:
                self.empty = True
            else:
                self.taken.append(window)
        return len(self.taken) - before

    def rest(self) -> list[int]:
        """The tokens that filled no window."""
        return self._buffer


class _Cutter:
    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, seqlen: int) -> None:
        self._tokenizer, self._seqlen = tokenizer, seqlen
        self._template = template if template is not None and template.exists else None
        markers = tokenizer.encode("", add_special_tokens=True)
        self._begin = markers[:1] if markers[:1] == [tokenizer.bos_id] else []
        self._between = self._begin or tokenizer.encode("\n\n")
        self._refused, self._why, self._plain = 0, "", 0

    def pieces(self, text: Document) -> Iterator[Document]:
        """A long text in pieces that end with a paragraph, line or word where there is one."""
        if not isinstance(text, str):
            yield text
            return
        length, start = _PIECE * self._seqlen, 0
        while len(text) - start > length + length // 2:
            stop = _cut(text, start + length // 2, start + length)
            yield text[start:stop]
            start = stop
        yield text[start:]

    def windows(self, pieces: Sequence[Document], buffer: list[int]) -> Iterator[list[int]]:
        """All full windows; what is left in the end stays in `buffer`."""
        for piece in pieces:
            ids = self._encode(piece)
            while len(ids) + len(self._lead(ids)) >= self._seqlen:
                lead = self._lead(ids)
                cut = self._seqlen - len(lead)
                yield lead + ids[:cut]
                ids = ids[cut:]
            if not ids:
                continue
            if buffer and self._lead(ids):
                buffer += self._between
            elif not buffer:
                buffer += self._lead(ids)
            buffer += ids
            if len(buffer) >= self._seqlen:
                yield buffer[: self._seqlen]
                buffer.clear()

    def _lead(self, ids: list[int]) -> list[int]:
        return [] if ids[:1] == self._begin and self._begin else self._begin

    def _encode(self, piece: Document) -> list[int]:
        if isinstance(piece, str):
            return self._tokenizer.encode(piece)
        if self._template is None:
            self._plain += 1
            return self._tokenizer.encode("\n\n".join(message["content"] for message in piece))
        try:
            return self._template.encode(piece, add_generation_prompt=False)
        except RequestError as error:
            self._refused += 1
            self._why = self._why or error.message
            return []

    def warnings(self) -> list[str]:
        out = []
        if self._refused:
            out.append(f"{self._refused} conversations were skipped: {self._why}")
        if self._plain:
            out.append(
                f"{self._plain} conversations were joined as plain text: the model has no chat template"
            )
        return out


def _cut(text: str, first: int, last: int) -> int:
    """The best place to cut in [first, last]."""
    for mark in ("\n\n", "\n", "。", " "):
        found = text.rfind(mark, first, last)
        if found >= 0:
            return found + len(mark)
    return last


def _fill(streams: list[_Stream], samples: int) -> None:
    """Each source its share; what one lacks is taken from the others."""
    lacking = sum(
        quota - stream.take(quota)
        for stream, quota in zip(streams, shares([s.part.weight for s in streams], samples), strict=True)
    )
    while lacking and (able := [stream for stream in streams if not stream.empty]):
        total = sum(stream.part.weight for stream in able)
        quotas = shares([stream.part.weight / total for stream in able], lacking)
        lacking -= sum(stream.take(quota) for stream, quota in zip(able, quotas, strict=True))


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Whole numbers that sum to `total`, each less than 1 off its weight's part (largest remainders)."""
    exact = [weight * total / sum(weights) for weight in weights]
    out = [int(x) for x in exact]
    by_rest = sorted(range(len(exact)), key=lambda i: (out[i] - exact[i], i))
    for i in by_rest[: total - sum(out)]:
        out[i] += 1
    return out


def _shortage(streams: list[_Stream], samples: int, seqlen: int, ids: npt.NDArray[np.int64]) -> list[str]:
    out = []
    quotas = shares([s.part.weight for s in streams], samples)
    windows, tokens = ids.shape
    if windows < samples or tokens < seqlen:
        out.append(
            f"too little calibration text: {samples} windows of {seqlen} tokens were asked for, there are"
            f" {windows} of {tokens} ({windows * tokens} of {samples * seqlen} tokens)"
        )
    elif len(streams) > 1:
        out += [
            f"{stream.part.name}: its share is {quota} windows, it has {len(stream.taken)}; others fill in"
            for stream, quota in zip(streams, quotas, strict=True)
            if len(stream.taken) < quota
        ]
    return out


def _describe(
    source: str | None, streams: list[_Stream], ids: npt.NDArray[np.int64], seed: int
) -> dict[str, Any]:
    return {
        "source": source or builtin.NAME,
        "windows": ids.shape[0],
        "tokens": ids.shape[1],
        "seed": seed,
        "sha256": hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest(),
        "parts": [
            {
                "name": stream.part.name,
                "weight": round(stream.part.weight, 6),
                "documents": stream.documents,
                "windows": len(stream.taken),
                "sha256": stream.sha256,
                **({"files_cut": stream.notes.cut} if stream.notes.cut else {}),
            }
            for stream in streams
        ],
    }


def _digest(documents: Sequence[Document]) -> str:
    digest = hashlib.sha256()
    for text in documents:
        parts = [text] if isinstance(text, str) else [x for m in text for x in (m["role"], m["content"])]
        for part in parts:
            digest.update(part.encode())
            digest.update(b"\0")
    return digest.hexdigest()


def _shuffle(values: list[Any], seed: int) -> None:
    """In place; from `random.random` alone, whose values Python promises to keep."""
    draw = random.Random(seed)
    for i in range(len(values) - 1, 0, -1):
        j = int(draw.random() * (i + 1))
        values[i], values[j] = values[j], values[i]
