"""What a parser makes of a model's words: text, reasoning, tool calls.

Owns the parts and the protocol of parsers. Knows no format and no wire.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """Words of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Words of the thinking before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolStart:
    """A call begins; `index` counts the calls of one answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """More of the arguments of call `index`; joined they are one JSON text."""

    index: int
    text: str


Part = Text | Reasoning | ToolStart | ToolArguments


class Parser(Protocol):
    """Reads one answer piece by piece; the parts, joined, are the same for every way of cutting it."""

    def feed(self, text: str) -> list[Part]:
        """The parts that this further text makes certain."""
        ...

    def finish(self) -> list[Part]:
        """The answer has ended: what was held back."""
        ...


def joined(parts: Iterable[Part]) -> list[Part]:
    """The same parts with neighbours of one kind as one, and without empty ones."""
    out: list[Part] = []
    for part in parts:
        last = out[-1] if out else None
        if isinstance(part, ToolStart):
            out.append(part)
        elif isinstance(part, ToolArguments):
            if isinstance(last, ToolArguments) and last.index == part.index:
                out[-1] = ToolArguments(part.index, last.text + part.text)
            elif part.text:
                out.append(part)
        elif last is not None and type(last) is type(part):
            out[-1] = type(part)(last.text + part.text)
        elif part.text:
            out.append(part)
    return out
