"""SentencePiece vocabularies, wherever they were read from -> a tokenizers.Tokenizer with the same ids.

BPE and unigram. Pieces have the kinds of SentencePiece's public format. Two known differences: a text that is
nothing but one user-defined piece gets no blank in front, and where only the first segment has that blank,
none comes before a user-defined piece that begins the text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from lmdeploy.errors import ModelError
from lmdeploy.text.merges import merges_by_rank

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_SPACE = "▁"  # stands for a blank
_BYTE_TEXT = r"<(?=0x[0-9A-Fa-f]{2}>)"


@dataclass(frozen=True, slots=True)
class Pieces:
    """texts, scores and kinds have one entry per id.

    prefix: a blank comes before the text ("every" piece of text between control tokens, only the "first", or
    "none"). raw_user_defined: user-defined pieces are found in the text as it is given and end a segment,
    else in the text with its blanks replaced. charsmap: SentencePiece's compiled normalisation, if any.
    """

    texts: Sequence[str]
    scores: Sequence[float]
    kinds: Sequence[int]
    unigram: bool = False
    prefix: str = "every"
    raw_user_defined: bool = False
    collapse_spaces: bool = False
    charsmap: bytes = b""

    def of_kind(self, *kinds: int) -> list[str]:
        return [text for text, kind in zip(self.texts, self.kinds, strict=True) if kind in kinds]


def backend_from_pieces(pieces: Pieces, source: str) -> Tokenizer:
    """Raises ModelError naming `source` when the vocabulary is not sound."""
    if not all(map(math.isfinite, pieces.scores)):
        raise ModelError(f"{source}: the vocabulary holds a score that is no finite number.")
    if len(set(pieces.texts)) != len(pieces.texts):
        raise ModelError(f"{source}: the vocabulary holds a piece twice.")
    try:
        backend = Tokenizer(_unigram(pieces) if pieces.unigram else _bpe(pieces))
    except Exception as error:  # the library raises nothing more specific
        raise ModelError(f"{source}: the vocabulary is not sound: {str(error).splitlines()[0]}.") from None
    backend.normalizer = _normalizer(pieces)
    backend.pre_tokenizer = _pre_tokenizer(pieces)
    backend.decoder = _decoder(pieces)
    controls = pieces.of_kind(CONTROL, UNKNOWN)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in controls])
    backend.add_tokens(
        [AddedToken(text, normalized=not pieces.raw_user_defined) for text in _found_first(pieces)]
    )
    return backend


def _found_first(pieces: Pieces) -> list[str]:
    """User-defined pieces of BPE are found before merging; those of unigram only have a score."""
    return [] if pieces.unigram else pieces.of_kind(USER_DEFINED)


def add_markers(backend: Tokenizer, begin: Sequence[str], end: Sequence[str], ids: Mapping[str, int]) -> None:
    """Tokens that encoding with special tokens puts before and behind a text."""
    if begin or end:
        backend.post_processor = processors.TemplateProcessing(
            single=[*begin, "$A", *end],
            special_tokens=[(text, ids[text]) for text in dict.fromkeys((*begin, *end))],
        )


def _bpe(pieces: Pieces) -> Any:
    """Merges come from the scores; what is not ordinary text is never made by merging."""
    entries = zip(pieces.texts, pieces.scores, pieces.kinds, strict=True)
    ordinary = sorted(
        (-score, i, text) for i, (text, score, kind) in enumerate(entries) if kind == NORMAL and text
    )
    ranks = {text: rank for rank, (_, _, text) in enumerate(ordinary)}
    unknown = pieces.of_kind(UNKNOWN)
    return models.BPE(
        {text: i for i, text in enumerate(pieces.texts)},
        merges_by_rank(ranks),
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=BYTE in pieces.kinds,
    )


def _unigram(pieces: Pieces) -> Any:
    """Pieces that are no text get the score of the worst text: they must not set the unknown's score."""
    entries = list(zip(pieces.texts, pieces.scores, pieces.kinds, strict=True))
    worst = min((score for _, score, kind in entries if kind == NORMAL), default=0.0)
    scored = [(t, score if kind in (NORMAL, USER_DEFINED) else worst) for t, score, kind in entries]
    unknown = next((i for i, kind in enumerate(pieces.kinds) if kind == UNKNOWN), None)
    return models.Unigram(scored, unknown, BYTE in pieces.kinds)


def _normalizer(pieces: Pieces) -> Any:
    steps: list[Any] = []
    if pieces.charsmap:
        steps.append(normalizers.Precompiled(pieces.charsmap))
    if pieces.collapse_spaces:
        steps += [
            normalizers.Replace(Regex(r"\A +| +\z"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    if pieces.prefix == "every":
        steps.append(_prefix_step(pieces))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])


def _prefix_step(pieces: Pieces) -> Any:
    """The library normalises user-defined pieces as it does text; those must not get a blank."""
    kept = _found_first(pieces)
    if not kept or pieces.raw_user_defined:
        return normalizers.Prepend(_SPACE)
    alternatives = "|".join(map(re.escape, kept))
    return normalizers.Replace(Regex(rf"\A(?!(?:{alternatives})\z)"), _SPACE)


def _pre_tokenizer(pieces: Pieces) -> Any:
    steps: list[Any] = []
    if pieces.prefix == "first":
        steps.append(pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False))
    if pieces.unigram and BYTE in pieces.kinds:  # the text "<0x0A>" is no line feed
        steps.append(pre_tokenizers.Split(Regex(_BYTE_TEXT), "merged_with_previous"))
    return pre_tokenizers.Sequence(steps) if steps else None


def _decoder(pieces: Pieces) -> Any:
    steps: list[Any] = [decoders.Replace(_SPACE, " ")]
    if BYTE in pieces.kinds:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if pieces.prefix != "none":
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)
