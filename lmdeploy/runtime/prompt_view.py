"""A prompt for people: its tokens one by one, and where two of them begin to differ.

Knows neither where the prompts come from nor how they are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmdeploy.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a prompt. text: None when its bytes are no whole characters."""

    index: int
    id: int
    text: str | None
    raw: bytes
    control: bool

    def shown(self) -> str:
        if self.control:
            return f"{self.text} (control token)"
        return repr(self.raw if self.text is None else self.text)

    def fields(self) -> dict[str, Any]:
        """For JSON."""
        text = self.raw.decode("utf-8", "replace")
        return {"index": self.index, "id": self.id, "text": text, "control": self.control}


def tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> list[Token]:
    """The tokens of a prompt in order."""
    return [_token(tokenizer, index, token_id) for index, token_id in enumerate(ids)]


def _token(tokenizer: Tokenizer, index: int, token_id: int) -> Token:
    raw = tokenizer.token_bytes(token_id)
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        text = None
    return Token(index, token_id, text, raw, token_id in tokenizer.special_ids)


def first_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> int | None:
    """The first index at which two sequences differ, which may be the end of one; None: they are equal."""
    for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return index
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))
