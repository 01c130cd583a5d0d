"""Parsers written as if the whole text were there.

A script is a generator that reads a `Source` and tells a `Sink` what it found; it pauses where it needs more
text. Nothing in it can depend on how the text was cut: a primitive decides only when its answer can no longer
change. Knows no format.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from lmdeploy.serve.parsers.base import Part, Reasoning, Text, ToolArguments, ToolStart

T = TypeVar("T")
Steps = Generator[None, None, T]
Write = Callable[[str], None]

BLANKS = " \t\r\n"
_BLANKS = re.compile(f"[{BLANKS}]*")


class Source:
    """The text of one answer so far and how much of it a script has read."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._base = 0  # characters before `_text`
        self._kept: int | None = None  # place that must stay readable
        self._ended = False

    def add(self, text: str) -> None:
        """More text. What was read and may not be wanted again is forgotten."""
        keep = self._at if self._kept is None else self._kept - self._base
        self._text = self._text[keep:] + text
        self._base += keep
        self._at -= keep

    def end(self) -> None:
        self._ended = True

    @property
    def place(self) -> int:
        """Characters read so far; valid for `back` and `since` after `keep`."""
        return self._base + self._at

    def keep(self) -> int:
        """The place from now on stays readable until `release`."""
        self._kept = self.place
        return self._kept

    def release(self) -> None:
        self._kept = None

    def since(self, place: int) -> str:
        """What was read after `place`."""
        return self._text[place - self._base : self._at]

    def back(self, place: int) -> None:
        """Read again from `place`."""
        self._at = place - self._base

    def peek(self) -> Steps[str]:
        """The next character; "" at the end."""
        while self._at == len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def read(self, count: int) -> Steps[str]:
        """The next `count` characters; fewer only at the end."""
        while len(self._text) - self._at < count and not self._ended:
            yield
        self._at += (taken := min(count, len(self._text) - self._at))
        return self._text[self._at - taken : self._at]

    def skip(self, *texts: str) -> Steps[str]:
        """Read the one of `texts` that comes next, and say which; "" when none does."""
        while True:
            rest = self._text[self._at : self._at + max(map(len, texts))]
            for text in texts:
                if rest.startswith(text):
                    self._at += len(text)
                    return text
            if self._ended or not any(text.startswith(rest) for text in texts):
                return ""
            yield

    def copy(self, kind: re.Pattern[str], write: Write) -> Steps[None]:
        """Write the characters that come next as far as they are of `kind`, a pattern of characters."""
        while True:
            match = kind.match(self._text, self._at)
            if match is not None and match.end() > self._at:
                self._at = match.end()
                write(match[0])
            if self._at < len(self._text) or self._ended:
                return
            yield

    def blanks(self) -> Steps[None]:
        """Read blanks and line ends."""
        yield from self.copy(_BLANKS, _nowhere)

    def until(self, marks: Sequence[str], write: Write, hold: str = "") -> Steps[tuple[str, str]]:
        """Write what comes before the first of `marks` and read the mark too: (mark, held text before it).

        The mark is "" at the end of the text. Of marks at one place the longest is meant. Held are the
        characters of `hold` that stand right before the mark or the end: they are read and not written.
        """
        longest = max(map(len, marks))
        start = self._at
        while True:
            at, mark = self._first(marks, start)
            if self._ended or (mark and not self._may_grow(marks, at, mark)):
                border = self._before(at, hold)
                held = self._text[border:at]
                self._write_to(border, write)
                self._at = at + len(mark)
                return mark, held
            if not mark:
                at -= self._doubtful(marks, longest)
            self._write_to(self._before(at, hold), write)
            searched = len(self._text) - self._at
            yield
            start = self._at + max(0, searched - longest)

    def _first(self, marks: Sequence[str], start: int) -> tuple[int, str]:
        """Place and text of the first mark; the end of what is there and "" when there is none."""
        places = ((self._text.find(mark, start), -len(mark), mark) for mark in marks)
        at, _, mark = min((p for p in places if p[0] >= 0), default=(len(self._text), 0, ""))
        return at, mark

    def _may_grow(self, marks: Sequence[str], at: int, found: str) -> bool:
        """Whether a mark longer than `found` may still come true at the same place."""
        rest = self._text[at:]
        return any(len(mark) > len(rest) and mark.startswith(rest) for mark in marks)

    def _write_to(self, end: int, write: Write) -> None:
        if end > self._at:
            write(self._text[self._at : end])
            self._at = end

    def _before(self, end: int, hold: str) -> int:
        while hold and end > self._at and self._text[end - 1] in hold:
            end -= 1
        return end

    def _doubtful(self, marks: Sequence[str], longest: int) -> int:
        """Length of the longest tail that may become a mark."""
        for length in range(min(longest - 1, len(self._text) - self._at), 0, -1):
            tail = self._text[-length:]
            if any(mark.startswith(tail) for mark in marks):
                return length
        return 0


def _nowhere(text: str) -> None:
    """Drops what it is given."""


def new_call_id() -> str:
    return "call_" + uuid.uuid4().hex[:24]


class Sink:
    """Where a script puts what it found."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self.calls = 0

    def take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def text(self, text: str) -> None:
        self._parts.append(Text(text))

    def reasoning(self, text: str) -> None:
        self._parts.append(Reasoning(text))

    def call(self, name: str) -> None:
        """A call begins; `arguments` belong to it until the next one."""
        self._parts.append(ToolStart(self.calls, new_call_id(), name))
        self.calls += 1

    def arguments(self, text: str) -> None:
        self._parts.append(ToolArguments(self.calls - 1, text))


Script = Callable[[Source, Sink], Steps[None]]


class ScriptParser:
    """A parser that runs a script; what the script leaves unread at its own end is dropped."""

    def __init__(self, script: Script) -> None:
        self._source, self._sink = Source(), Sink()
        self._steps: Steps[None] | None = script(self._source, self._sink)

    def feed(self, text: str) -> list[Part]:
        self._source.add(text)
        return self._run()

    def finish(self) -> list[Part]:
        self._source.end()
        parts = self._run()
        assert self._steps is None, "a script must end with its text"
        return parts

    def _run(self) -> list[Part]:
        if self._steps is not None and next(self._steps, _ENDED) is _ENDED:
            self._steps = None
        return self._sink.take()


_ENDED = object()
