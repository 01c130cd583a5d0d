"""JSON read character by character: checked while it is copied.

Owns what counts as JSON here. Line ends and other control characters inside strings, which models write
though JSON forbids them, are escaped on the way; nothing else is repaired. Knows no format of calls.
"""

from __future__ import annotations

import json
import re

from lmdeploy.serve.parsers.script import Source, Steps, Write

DEEPEST = 100
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_WORD = re.compile(r"[-+.\w]*")
_SCALAR = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?|true|false|null")
_HEX = re.compile(r"[0-9a-fA-F]{4}")


def copy_value(source: Source, write: Write, depth: int = 0) -> Steps[bool]:
    """Copy the JSON value that comes next. False where it is none: what was read until then is written."""
    first = yield from source.peek()
    if first == '"':
        return (yield from copy_string(source, write))
    if first in ("{", "[") and depth < DEEPEST:
        return (yield from _copy_items(source, write, first, depth))
    word: list[str] = []
    yield from source.copy(_WORD, word.append)
    write("".join(word))
    return _SCALAR.fullmatch("".join(word)) is not None


def copy_string(source: Source, write: Write) -> Steps[bool]:
    """Copy a string with its quotes. False where it is none or the text ends in it."""
    if not (yield from source.skip('"')):
        return False
    write('"')
    while True:
        yield from source.copy(_PLAIN, write)
        char = yield from source.read(1)
        if char == "\\":
            if not (yield from _copy_escape(source, write)):
                return False
        elif char == '"' or not char:
            write(char)
            return char == '"'
        else:
            write(json.dumps(char)[1:-1])


def _copy_escape(source: Source, write: Write) -> Steps[bool]:
    kind = yield from source.read(1)
    digits = (yield from source.read(4)) if kind == "u" else ""
    write("\\" + kind + digits)
    return _HEX.fullmatch(digits) is not None if kind == "u" else kind != "" and kind in '"\\/bfnrt'


def _copy_items(source: Source, write: Write, opening: str, depth: int) -> Steps[bool]:
    """An object or a list."""
    closing = {"{": "}", "[": "]"}[opening]
    write((yield from source.read(1)))
    yield from source.blanks()
    if (yield from source.skip(closing)):
        write(closing)
        return True
    while True:
        if opening == "{" and not (yield from _copy_key(source, write)):
            return False
        if not (yield from copy_value(source, write, depth + 1)):
            return False
        yield from source.blanks()
        mark = yield from source.skip(",", closing)
        write(", " if mark == "," else mark)
        if mark != ",":
            return mark != ""
        yield from source.blanks()


def _copy_key(source: Source, write: Write) -> Steps[bool]:
    if not (yield from copy_string(source, write)):
        return False
    yield from source.blanks()
    if not (yield from source.skip(":")):
        return False
    write(": ")
    yield from source.blanks()
    return True


def read_value(source: Source) -> Steps[str | None]:
    """The JSON text of the value that comes next; None where it is none."""
    pieces: list[str] = []
    good = yield from copy_value(source, pieces.append)
    return "".join(pieces) if good else None
