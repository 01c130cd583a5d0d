"""Calls written like code.

Python calls in a list (Llama 4: https://www.llama.com/docs/model-cards-and-prompt-formats/llama4, Llama 3.2
with https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_2, LFM2, Gemma 3:
https://ai.google.dev/gemma/docs/capabilities/function-calling), and Gemma's own notation
(https://ai.google.dev/gemma/docs/functiongemma, the template of Gemma 4).
"""

from __future__ import annotations

import re
from collections.abc import Callable

from lmdeploy.serve.parsers.script import Script, Sink, Source, Steps, Write
from lmdeploy.serve.parsers.tool.common import ToolFormat, among_text, holds
from lmdeploy.serve.parsers.tools import ToolSet, read_literal, to_json

_NAME = re.compile(r"[\w.\-]*")
_DEEPEST = 100
_PYTHON_MARKS = (
    "<|python_start|>",
    "<|python_end|>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "```tool_code",
)
_PYTHON_ENDS = ("<|python_end|>", "<|tool_call_end|>", "```")


def _name(source: Source) -> Steps[str]:
    pieces: list[str] = []
    yield from source.copy(_NAME, pieces.append)
    return "".join(pieces)


def _pythonic(tools: ToolSet) -> Script:
    """A list of calls at the very beginning or behind a mark; only known names are calls."""

    def script(source: Source, sink: Sink) -> Steps[None]:
        place = source.keep()
        if not (yield from _read_list(source, sink, tools, "")):
            source.back(place)
        source.release()
        yield from rest(source, sink)

    starts = tuple(mark for mark in _PYTHON_MARKS if mark not in _PYTHON_ENDS)
    rest = among_text(starts, _read_list)(tools)
    return script


def _read_list(source: Source, sink: Sink, tools: ToolSet, mark: str) -> Steps[bool]:
    before = sink.calls
    yield from source.blanks()
    bracket = yield from source.skip("[")
    if not bracket and not mark:
        return False
    while True:
        yield from source.blanks()
        if not (yield from _read_python_call(source, sink, tools)):
            break
        yield from source.blanks()
        yield from source.skip(",")
    if sink.calls > before:
        yield from source.blanks()
        yield from source.skip("]")
        yield from source.blanks()
        yield from source.skip(*_PYTHON_ENDS)
    return sink.calls > before


def _read_python_call(source: Source, sink: Sink, tools: ToolSet) -> Steps[bool]:
    place = source.place
    name = yield from _name(source)
    if name not in tools.names or not (yield from source.skip("(")):
        source.back(place)
        return False
    sink.call(name)
    sink.arguments("{")
    before = ""
    while True:
        yield from source.blanks()
        if (yield from source.skip(")")):
            sink.arguments("}")
            return True
        key = yield from _name(source)
        yield from source.blanks()
        if not key or not (yield from source.skip("=")):
            # No argument by name: it goes on as it is.
            yield from source.until((")",), sink.arguments)
            return True
        value = yield from _python_value(source)
        sink.arguments(f"{before}{to_json(key)}: {value}")
        before = ", "
        yield from source.blanks()
        yield from source.skip(",")


def _python_value(source: Source) -> Steps[str]:
    """The value up to the comma or bracket behind it, as JSON: as a string where it is no literal.

    What the text's end cuts off stays as it is.
    """
    raw: list[str] = []
    depth, quote = 0, ""
    while True:
        char = yield from source.peek()
        if not char:
            return "".join(raw)
        if not quote and depth == 0 and char in ",)":
            break
        raw.append((yield from source.read(1)))
        if quote:
            if char == "\\":
                raw.append((yield from source.read(1)))
            elif char == quote:
                quote = ""
        elif char in "'\"":
            quote = char
        elif char in "[{(":
            depth += 1
        elif char in "]})":
            depth -= 1
    text = "".join(raw).strip()
    good, value = read_literal(text.replace("\n", "\\n"))
    return to_json(value if good else text)


PYTHONIC = ToolFormat(
    ("pythonic", "llama4", "llama4_pythonic", "lfm2", "gemma3"),
    _PYTHON_MARKS,
    lambda text: "<|python_start|>" in text or "<|tool_call_start|>" in text or "func_name1(" in text,
    _pythonic,
)


def _notation(opening: str, closing: str, quote: str) -> Callable[[ToolSet], Script]:
    """`call:NAME{key:<quote>text<quote>,key:1}` between two marks."""

    def read_call(source: Source, sink: Sink, tools: ToolSet, mark: str) -> Steps[bool]:
        yield from source.blanks()
        if not (yield from source.skip("call:")):
            return False
        name = yield from _name(source)
        if not name or (yield from source.peek()) != "{":
            return False
        sink.call(name)
        good = yield from _copy_notation(source, sink.arguments, quote, 0)
        if good:
            yield from source.blanks()
            yield from source.skip(closing)
        else:
            yield from source.until((closing,), sink.arguments)
        return True

    return among_text((opening,), read_call)


def _copy_notation(source: Source, write: Write, quote: str, depth: int) -> Steps[bool]:
    """Write as JSON the value that comes next. False where it breaks off."""
    if (yield from source.skip(quote)):
        write('"')
        mark, _ = yield from source.until((quote,), lambda text: write(to_json(text)[1:-1]))
        write('"' if mark else "")
        return mark != ""
    opening = yield from source.skip("{", "[")
    if opening and depth < _DEEPEST:
        return (yield from _copy_members(source, write, quote, depth, opening))
    word: list[str] = []
    yield from source.copy(re.compile(r"[^,{}\[\]]*"), word.append)
    text = "".join(word).strip()
    good, value = read_literal(text)
    write(to_json(value if good else text))
    return text != ""


def _copy_members(source: Source, write: Write, quote: str, depth: int, opening: str) -> Steps[bool]:
    closing = {"{": "}", "[": "]"}[opening]
    write(opening)
    first = True
    while True:
        yield from source.blanks()
        if (yield from source.skip(closing)):
            write(closing)
            return True
        write("" if first else ", ")
        first = False
        if opening == "{" and not (yield from _copy_key(source, write, quote)):
            return False
        yield from source.blanks()
        if not (yield from _copy_notation(source, write, quote, depth + 1)):
            return False
        yield from source.blanks()
        yield from source.skip(",")


def _copy_key(source: Source, write: Write, quote: str) -> Steps[bool]:
    """A name, with or without quotes, and the colon."""
    quoted = yield from source.skip(quote)
    pieces: list[str] = []
    mark, _ = yield from source.until((quote if quoted else ":", "\n", "}"), pieces.append)
    key = "".join(pieces).strip()
    if mark != (quote if quoted else ":") or not key:
        return False
    if quoted and not (yield from source.skip(":")):
        return False
    write(to_json(key) + ": ")
    return True


def _gemma(names: tuple[str, ...], opening: str, closing: str, quote: str) -> ToolFormat:
    marks = (opening, closing, quote)
    return ToolFormat(names, marks, holds(opening, "call:"), _notation(opening, closing, quote))


GEMMA4 = _gemma(("gemma4",), "<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = _gemma(("functiongemma",), "<start_function_call>", "<end_function_call>", "<escape>")
