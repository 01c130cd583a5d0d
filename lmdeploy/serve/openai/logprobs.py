"""Log-probabilities in the two shapes of the API.

Values are natural log-softmax of the raw logits, never below FLOOR and always JSON numbers. Knows no route.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from lmdeploy.engine.request import TokenLogprobs
from lmdeploy.runtime.generate import Delta
from lmdeploy.text.tokenizer import Tokenizer

FLOOR = -9999.0


def floored(value: float) -> float:
    """A number JSON can hold; what is impossible gets FLOOR."""
    return value if math.isfinite(value) and value > FLOOR else FLOOR


def printed(entries: Sequence[TokenLogprobs], end: Delta) -> Sequence[TokenLogprobs]:
    """The entries whose text was returned: all but that of a token that ended the answer without printing."""
    return entries[:-1] if end.silent_stop is not None else entries


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], top: int) -> dict[str, Any]:
    """The `logprobs` object of a chat choice; `top` alternatives for each token, most likely first."""
    return {"content": [_chat_entry(tokenizer, e, top) for e in entries], "refusal": None}


def _chat_entry(tokenizer: Tokenizer, entry: TokenLogprobs, top: int) -> dict[str, Any]:
    pairs = list(zip(entry.top_ids, entry.top_logprobs, strict=True))[:top]
    alternatives = [_token(tokenizer, i, value) for i, value in pairs if i >= 0]
    return {**_token(tokenizer, entry.token_id, entry.logprob), "top_logprobs": alternatives}


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": tokenizer.token_text(token_id), "logprob": floored(logprob), "bytes": list(raw)}


class CompletionLogprobs:
    """The four parallel lists of a completions choice; text offsets continue over the parts of a stream."""

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._offset = 0

    def part(
        self, entries: Iterable[TokenLogprobs], texts: Iterable[str], first: int | None = None
    ) -> dict[str, list[Any]]:
        """Lists for these tokens. `texts` are what each adds to the returned text, for the offsets.

        `first` is the id of a prompt's first token, which nothing precedes: its value is null.
        """
        out: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        pieces = iter(texts)
        if first is not None:
            self._append(out, self._name(first), None, None, next(pieces))
        for entry, text in zip(entries, pieces, strict=True):
            value = floored(entry.logprob)
            self._append(out, self._name(entry.token_id), value, self._alternatives(entry, value), text)
        return out

    def _append(
        self, out: dict[str, list[Any]], token: str, value: float | None, top: Any, text: str
    ) -> None:
        out["tokens"].append(token)
        out["token_logprobs"].append(value)
        out["top_logprobs"].append(top)
        out["text_offset"].append(self._offset)
        self._offset += len(text)

    def _alternatives(self, entry: TokenLogprobs, value: float) -> dict[str, float]:
        """The `top` most likely tokens and, as the same float, the sampled one."""
        pairs = list(zip(entry.top_ids, entry.top_logprobs, strict=True))[: self._top]
        found = {self._name(i): floored(v) for i, v in pairs if i >= 0}
        return found | {self._name(entry.token_id): value}

    def _name(self, token_id: int) -> str:
        """The token's text; bytes that are no whole characters are spelled out, so that names stay apart."""
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
