"""What tool formats share: text around calls, calls as JSON objects, arguments as JSON.

A format is a `ToolFormat`: its names, the marks it is known by, and a script for the tools of a request. A
call function reads what follows a mark and returns False, having told nothing, when it is no call: then the
mark was text. Once a call has been told it cannot be taken back, so whatever follows up to the format's
closing mark becomes its arguments.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmdeploy.errors import text_problem
from lmdeploy.serve.parsers.json_text import copy_string, copy_value, read_value
from lmdeploy.serve.parsers.script import BLANKS, Script, Sink, Source, Steps
from lmdeploy.serve.parsers.tools import ToolSet

ReadCall = Callable[[Source, Sink, ToolSet, str], Steps[bool]]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way of writing calls.

    marks: texts the script looks for; where they are control tokens, they must reach it as text.
    found_in: whether a chat template writes calls this way.
    """

    names: tuple[str, ...]
    marks: tuple[str, ...]
    found_in: Callable[[str], bool]
    script: Callable[[ToolSet], Script]


def holds(*texts: str) -> Callable[[str], bool]:
    """A template test: all of these stand in it."""
    return lambda template: all(text in template for text in texts)


def among_text(marks: Sequence[str], read_call: ReadCall) -> Callable[[ToolSet], Script]:
    """A script for calls that begin with one of `marks` anywhere in the text.

    Blanks beside a call belong to it, but those in front of it stay between texts before and behind it.
    """

    def make(tools: ToolSet) -> Script:
        def script(source: Source, sink: Sink) -> Steps[None]:
            text = _Text(sink)
            while True:
                mark, held = yield from source.until(marks, text.write, hold=BLANKS)
                if not mark:
                    text.write(held)
                    return
                place = source.keep()
                if (yield from read_call(source, sink, tools, mark)):
                    yield from source.blanks()
                    text.gap = text.gap or held
                else:
                    source.back(place)
                    text.write(held + mark)
                source.release()

        return script

    return make


class _Text:
    """The text of an answer; `gap` is what stood in front of calls, told when text follows them."""

    def __init__(self, sink: Sink) -> None:
        self.gap = ""
        self._sink, self._begun = sink, False

    def write(self, text: str) -> None:
        if text:
            self._sink.text((self.gap if self._begun else "") + text)
            self.gap, self._begun = "", True


def read_json_call(
    source: Source,
    sink: Sink,
    names: Sequence[str] = ("name",),
    arguments: Sequence[str] = ("arguments", "parameters"),
    known: ToolSet | None = None,
) -> Steps[bool]:
    """Read `{"name": ..., "arguments": {...}}`, members in any order; False where it is none or breaks off.

    Whether a call was told by then is in `sink.calls`. known: only its tools count.
    """
    if not (yield from source.skip("{")):
        return False
    name, early = "", None
    told = False
    while True:
        yield from source.blanks()
        key = yield from _read_key(source)
        if key is None:
            return False
        if key in names and not name:
            name = _text_of((yield from read_value(source)))
            if not name or (known is not None and name not in known.names):
                return False
            if early is not None:
                sink.call(name)
                sink.arguments(early)
                told = True
        elif key in arguments and name and not told:
            if not (yield from read_arguments(source, sink, name)):
                return False
            told = True
        else:
            text = yield from read_value(source)
            if text is None:
                return False
            if key in arguments and not told:
                early = _object(text)
                if early is None:
                    return False
        yield from source.blanks()
        mark = yield from source.skip(",", "}")
        if mark != ",":
            break
    if mark and name and not told:
        sink.call(name)
        sink.arguments("{}")
    return bool(mark and name)


def _read_key(source: Source) -> Steps[str | None]:
    pieces: list[str] = []
    if not (yield from copy_string(source, pieces.append)):
        return None
    yield from source.blanks()
    if not (yield from source.skip(":")):
        return None
    yield from source.blanks()
    return _text_of("".join(pieces))


def _text_of(text: str | None) -> str:
    """The string a JSON text stands for; "" when it is none that can be sent."""
    value = None if text is None else json.loads(text)
    return value if isinstance(value, str) and text_problem(value) is None else ""


def _object(text: str) -> str | None:
    """Arguments as the text of an object: also from null, and from a string that holds one."""
    value = json.loads(text)
    if isinstance(value, str):
        try:
            inner = json.loads(value or "{}")
        except (ValueError, RecursionError):
            return None
        return value or "{}" if isinstance(inner, dict) else None
    if value is None:
        return "{}"
    return text if isinstance(value, dict) else None


def read_arguments(source: Source, sink: Sink, name: str) -> Steps[bool]:
    """Call `name` with the arguments that come next. False where they are none or break off."""
    if (yield from source.peek()) == "{":
        sink.call(name)
        return (yield from copy_value(source, sink.arguments))
    text = yield from read_value(source)
    arguments = None if text is None else _object(text)
    if arguments is None:
        return False
    sink.call(name)
    sink.arguments(arguments)
    return True


def read_to(source: Source, sink: Sink, closing: Sequence[str], told: bool) -> Steps[bool]:
    """Read on to a closing mark after something broke off; text until there belongs to a call that was told.

    False when none was told.
    """
    if told:
        yield from source.until(closing, sink.arguments)
    return told


def json_calls(
    opening: str,
    closing: str,
    names: Sequence[str] = ("name",),
    arguments: Sequence[str] = ("arguments", "parameters"),
) -> Callable[[ToolSet], Script]:
    """Calls as JSON objects, or lists of them, between two marks; the second may be missing at the end."""

    def read_call(source: Source, sink: Sink, tools: ToolSet, mark: str) -> Steps[bool]:
        before = sink.calls
        while True:
            yield from source.blanks()
            if (yield from source.skip(closing)):
                return sink.calls > before
            if (yield from source.skip("[", "]", ",", ";")):
                continue
            if not (yield from source.peek()):
                return sink.calls > before
            told = sink.calls
            if not (yield from read_json_call(source, sink, names, arguments)):
                if sink.calls > told:
                    return (yield from read_to(source, sink, (closing,), True))
                if sink.calls > before:
                    # What follows good calls and is none itself is dropped with the closing mark.
                    yield from source.until((closing,), lambda text: None)
                    return True
                return False

    return among_text((opening,), read_call)
