"""The held-out passages that models are measured on, and their token windows.

A passage is a text, so that models with different tokenizers read the same; its length is settled by the
original's tokenizer. Passages come from as many documents as there are: the first of each, then the second.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmdeploy.errors import ConfigError
from lmdeploy.text.tokenizer import Tokenizer

Encode = Callable[[str], list[int]]
_LEAST = 16  # tokens of a passage worth measuring


@dataclass(frozen=True, slots=True)
class Passages:
    """texts: by domain. source: what they are, in words."""

    texts: Mapping[str, tuple[str, ...]]
    source: str

    @property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for domain, texts in self.texts.items():
            digest.update("\0".join((domain, *texts, "")).encode())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Tokens:
    """windows: ids of every passage, domain by domain. spans: of each domain, its first window and the one
    after its last. sizes: of each window, bytes of the text that its ids after the first stand for."""

    windows: tuple[tuple[int, ...], ...]
    spans: Mapping[str, tuple[int, int]]
    sizes: tuple[int, ...]


def held_out_passages(tokenizer: Tokenizer, files: Sequence[str], samples: int, seqlen: int) -> Passages:
    """`samples` times `seqlen` tokens of each domain (less where there is less text). ConfigError names a
    file without text."""
    if files:
        documents = texts_of(files)
        source = ", ".join(files)
    else:
        from lmdeploy.lite.data import DOMAINS, held_out

        documents = {domain: held_out(domain) for domain in DOMAINS}
        source = "built-in held-out texts, which no calibration uses"
    chosen = {}
    for domain, texts in documents.items():
        chosen[domain] = tuple(_passages(texts, tokenizer.encode, samples * seqlen, seqlen))
        if not chosen[domain]:
            raise ConfigError(f"{domain}: no passage of {_LEAST} tokens or more to measure on")
    return Passages(chosen, source)


def tokenised(passages: Passages, tokenizer: Tokenizer) -> Tokens:
    """As a model reads them: with its own beginning-of-text token where it has one."""
    windows: list[tuple[int, ...]] = []
    sizes: list[int] = []
    spans: dict[str, tuple[int, int]] = {}
    for domain, texts in passages.texts.items():
        begin = len(windows)
        for text in texts:
            ids = tokenizer.encode(text, add_special_tokens=True)
            windows.append(tuple(ids))
            sizes.append(
                sum(len(tokenizer.token_bytes(i)) for i in ids[1:] if i not in tokenizer.special_ids)
            )
        spans[domain] = begin, len(windows)
    return Tokens(tuple(windows), spans, tuple(sizes))


def _passages(documents: Sequence[str], encode: Encode, tokens: int, seqlen: int) -> Iterator[str]:
    """Until there are so many tokens; the last one is cut to what is missing."""
    streams = [_pieces(text, encode, seqlen) for text in documents]
    missing = tokens
    while streams and missing >= _LEAST:
        for stream in list(streams):
            piece = next(stream, None)
            if piece is None:
                streams.remove(stream)
                continue
            piece = _fitting(piece, encode, missing)
            length = len(encode(piece))
            if length >= _LEAST:
                yield piece
                missing -= length
            if missing < _LEAST:
                return


def _pieces(text: str, encode: Encode, seqlen: int) -> Iterator[str]:
    while text.strip():
        piece = _fitting(text[: 16 * seqlen], encode, seqlen)
        yield piece
        text = text[len(piece) :]


def _fitting(text: str, encode: Encode, most: int) -> str:
    """The longest beginning of `text` found with at most `most` tokens; at least one character."""
    length = len(text)
    while length > 1:
        count = len(encode(text[:length]))
        if count <= most:
            break
        length = max(1, min(length - 1, int(length * most / count)))
    return text[:length]


def texts_of(files: Sequence[str]) -> dict[str, list[str]]:
    """The documents of each file, by domain. ConfigError for one that cannot be read."""
    found: dict[str, list[str]] = {}
    for name in files:
        path = Path(name).expanduser()
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
            raise ConfigError(f"--eval-text {name} cannot be read: {reason}") from None
        domain = path.stem if path.stem not in found else name
        found[domain] = _texts_of_lines(text, name) if path.suffix == ".jsonl" else [text]
    return found


def _texts_of_lines(text: str, name: str) -> list[str]:
    texts = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"--eval-text {name}, line {number}: no JSON ({error.msg})") from None
        value = record.get("text") if isinstance(record, dict) else None
        if not isinstance(value, str):
            has = ", ".join(record) if isinstance(record, dict) else type(record).__name__
            raise ConfigError(f"--eval-text {name}, line {number}: no field 'text' (there is: {has})")
        texts.append(value)
    return texts
