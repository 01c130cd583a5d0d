"""One answer in parts: text, reasoning and tool calls, with the tokens they came from and how it ended.

Stands between the text of `runtime.generate` and the protocols, which all read parts. Knows no wire format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from lmdeploy.engine.request import TokenLogprobs
from lmdeploy.runtime.generate import Delta
from lmdeploy.serve.parsers.base import Parser, Part, Reasoning, Text, ToolArguments, ToolStart, joined


@dataclass(frozen=True, slots=True)
class Said:
    """What one event made certain of one answer.

    `token_ids` and `logprobs` are the tokens whose text is in `parts`; a token that ended the answer without
    printing is among the first only. `finish_reason`: stop, length, tool_calls or None while it goes on.
    """

    parts: list[Part]
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class Call:
    """One tool call; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Message:
    """A whole answer, made of what was said."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class _Thought:
    """Counts the tokens of the reasoning: as many, from the answer's beginning, as have its bytes."""

    def __init__(self) -> None:
        self._ids: list[int] = []  # not counted yet
        self._missing = 0  # bytes of reasoning that no counted token covers
        self._over = False  # something else than reasoning has come
        self.tokens = 0

    def add(self, parts: Iterable[Part], ids: Iterable[int], token_bytes: Callable[[int], bytes]) -> None:
        if self._over and self._missing <= 0:
            return
        self._ids += ids
        self._missing += sum(len(p.text.encode()) for p in parts if isinstance(p, Reasoning))
        self._over = self._over or any(not isinstance(p, Reasoning) for p in parts)
        count = 0
        while self._missing > 0 and count < len(self._ids):
            self._missing -= len(token_bytes(self._ids[count]))
            count += 1
        self.tokens += count
        del self._ids[:count]


class PartStream:
    """Parts of one answer, fed with its deltas in order.

    parser: None lets all text through. token_bytes: the bytes of a token, for the count of reasoning tokens.
    calls_end: the finish_reason of an answer that stopped after calls. one_call: calls after the first are
    left out.
    """

    def __init__(
        self,
        parser: Parser | None = None,
        token_bytes: Callable[[int], bytes] | None = None,
        calls_end: str = "tool_calls",
        one_call: bool = False,
    ) -> None:
        self._parser = parser
        self._token_bytes = token_bytes
        self._thought = _Thought()
        self._calls_end = calls_end
        self._one_call = one_call
        self._called = False
        self._ids: list[int] = []  # of text that the parser holds back, as the next ones
        self._logprobs: list[TokenLogprobs] = []

    @property
    def reasoning_tokens(self) -> int:
        return self._thought.tokens

    def feed(self, delta: Delta) -> Said:
        """The parts this delta completes. After a finish_reason it must not be called again."""
        ended = delta.finish_reason is not None
        parts = self._parts(delta.text, ended)
        if self._parser is not None and self._token_bytes is not None:
            self._thought.add(parts, delta.token_ids, self._token_bytes)
        self._ids += delta.token_ids
        self._logprobs += delta.logprobs[:-1] if delta.silent_stop is not None else delta.logprobs
        if not parts and not ended and delta.text:
            return Said([])
        ids, logprobs = tuple(self._ids), tuple(self._logprobs)
        self._ids.clear()
        self._logprobs.clear()
        return Said(parts, ids, logprobs, self._reason(delta), delta.stop_reason)

    def _parts(self, text: str, ended: bool) -> list[Part]:
        if self._parser is None:
            return [Text(text)] if text else []
        parts = self._parser.feed(text) if text else []
        if ended:
            parts = [*parts, *self._parser.finish()]
        parts = joined(parts)
        if self._one_call:
            parts = [p for p in parts if not isinstance(p, ToolStart | ToolArguments) or p.index == 0]
        self._called = self._called or any(isinstance(p, ToolStart) for p in parts)
        return parts

    def _reason(self, delta: Delta) -> str | None:
        return self._calls_end if self._called and delta.finish_reason == "stop" else delta.finish_reason


def collect(said: Iterable[Said]) -> Message:
    """The whole answer of all that was said."""
    message = Message()
    texts: list[str] = []
    thoughts: list[str] = []
    arguments: list[list[str]] = []
    for one in said:
        for part in one.parts:
            if isinstance(part, Text):
                texts.append(part.text)
            elif isinstance(part, Reasoning):
                thoughts.append(part.text)
            elif isinstance(part, ToolStart):
                message.calls.append(Call(part.id, part.name))
                arguments.append([])
            else:
                arguments[part.index].append(part.text)
        message.token_ids += one.token_ids
        message.logprobs += one.logprobs
        message.finish_reason, message.stop_reason = one.finish_reason, one.stop_reason
    message.text, message.reasoning = "".join(texts), "".join(thoughts)
    for call, pieces in zip(message.calls, arguments, strict=True):
        call.arguments = "".join(pieces)
    return message
