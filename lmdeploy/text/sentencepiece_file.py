"""SentencePiece model files (tokenizer.model), read from their public protobuf layout.

Only the fields that decide ids are read. Every damaged file ends in a ModelError of one line.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from lmdeploy.errors import ModelError
from lmdeploy.text.pieces import NORMAL

# Field numbers of sentencepiece_model.proto: ModelProto, SentencePiece, TrainerSpec, NormalizerSpec.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _KIND = 1, 2, 3
_MODEL_TYPE, _SUFFIX, _UNKNOWN, _BEGIN, _END = 3, 24, 40, 41, 42
_CHARSMAP, _DUMMY_PREFIX, _EXTRA_SPACES, _ESCAPE = 2, 3, 4, 5
_MODEL_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}

Value = int | bytes


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """Pieces by id and the settings of the file; begin and end are ids, or -1."""

    texts: list[str]
    scores: list[float]
    kinds: list[int]
    unigram: bool
    dummy_prefix: bool
    remove_extra_spaces: bool
    charsmap: bytes
    begin: int
    end: int


def read_sentencepiece(data: bytes, source: str) -> SentencePieceModel:
    """Raises ModelError naming `source` for files that are damaged or of a kind that is not supported."""
    try:
        return _model(data, source)
    except (IndexError, struct.error, UnicodeDecodeError, TypeError, ValueError, AttributeError):
        raise ModelError(f"{source}: not a sound SentencePiece model.") from None


def _model(data: bytes, source: str) -> SentencePieceModel:
    texts, scores, kinds = [], [], []
    trainer: dict[int, Value] = {}
    normalizer: dict[int, Value] = {}
    for number, value in _fields(memoryview(data)):
        if number == _PIECES:
            piece = dict(_fields(memoryview(_bytes(value))))
            texts.append(_bytes(piece.get(_TEXT, b"")).decode())
            scores.append(struct.unpack("<f", _bytes(piece.get(_SCORE, bytes(4))))[0])
            kinds.append(_int(piece.get(_KIND, NORMAL)))
        elif number == _TRAINER:
            trainer = dict(_fields(memoryview(_bytes(value))))
        elif number == _NORMALIZER:
            normalizer = dict(_fields(memoryview(_bytes(value))))
    if not texts:
        raise ValueError("no pieces")
    kind = _MODEL_TYPES.get(_int(trainer.get(_MODEL_TYPE, 1)), "unknown")
    if kind not in ("unigram", "bpe"):
        raise ModelError(f"{source}: SentencePiece kind {kind!r} is not supported (supported: unigram, bpe).")
    if trainer.get(_SUFFIX) or not normalizer.get(_ESCAPE, 1):
        raise ModelError(f"{source}: SentencePiece models that keep blanks otherwise are not supported.")
    return SentencePieceModel(
        texts,
        scores,
        kinds,
        unigram=kind == "unigram",
        dummy_prefix=bool(normalizer.get(_DUMMY_PREFIX, 1)),
        remove_extra_spaces=bool(normalizer.get(_EXTRA_SPACES, 1)),
        charsmap=_bytes(normalizer.get(_CHARSMAP, b"")),
        begin=_signed(trainer.get(_BEGIN, 1)),
        end=_signed(trainer.get(_END, 2)),
    )


def _fields(data: memoryview) -> Iterator[tuple[int, Value]]:
    """(field number, value) of one protobuf message; fixed-width values stay bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if at + size > len(data):
            raise ValueError("cut off")
        yield number, bytes(data[at : at + size])
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return value, at
        if shift > 63:
            raise ValueError("number too long")


def _bytes(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number where bytes are expected")
    return value


def _int(value: Value) -> int:
    if not isinstance(value, int):
        raise ValueError("bytes where a number is expected")
    return value


def _signed(value: Value) -> int:
    """Negative numbers are written as 64-bit complements."""
    number = _int(value)
    return number - (1 << 64) if number >> 63 else number
