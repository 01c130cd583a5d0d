"""gpt-oss: an answer is a row of messages, each with a channel and perhaps a recipient.

https://cookbook.openai.com/articles/openai-harmony: channel `analysis` is reasoning, `final` the answer,
`commentary` text for the user (preambles) or, with a recipient `functions.NAME`, a call.
"""

from __future__ import annotations

import re

from lmdeploy.serve.parsers.json_text import copy_value
from lmdeploy.serve.parsers.script import BLANKS, Script, Sink, Source, Steps, Write
from lmdeploy.serve.parsers.tools import ToolSet

NAMES = ("gpt-oss", "openai", "harmony")
_START, _MESSAGE, _CHANNEL = "<|start|>", "<|message|>", "<|channel|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>", _START)
MARKS = (_MESSAGE, _CHANNEL, "<|constrain|>", *_ENDS)
_RECIPIENT = re.compile(r"\bto=([\w.\-]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")


def found_in(template: str) -> bool:
    """Whether a chat template writes messages this way."""
    return _CHANNEL in template and _MESSAGE in template


def script(tools: ToolSet | None, separate: bool = True) -> Script:
    """tools: None leaves calls in the text. separate: tell reasoning from text."""

    def run(source: Source, sink: Sink) -> Steps[None]:
        write_reasoning = sink.reasoning if separate else sink.text
        while (yield from source.peek()):
            yield from source.skip(_START)
            # Where the header is missing, the text is an answer.
            place = source.keep()
            if not (yield from source.skip(_CHANNEL, "assistant", " to=", "to=")):
                source.release()
                yield from source.until(_ENDS, sink.text)
                continue
            source.back(place)
            header: list[str] = []
            mark, _ = yield from source.until((_MESSAGE, *_ENDS), header.append)
            source.release()
            if mark == _MESSAGE:
                yield from _read_body("".join(header), tools, source, sink, write_reasoning)

    return run


def _read_body(
    header: str, tools: ToolSet | None, source: Source, sink: Sink, write_reasoning: Write
) -> Steps[None]:
    to = _RECIPIENT.search(header)
    channel = _CHANNEL_NAME.search(header)
    name = to[1].removeprefix("functions.") if to is not None else ""
    if name and tools is not None and to is not None and to[1] != name:
        sink.call(name)
        yield from source.blanks()
        if (yield from source.skip(*_ENDS)):
            sink.arguments("{}")
            return
        if (yield from source.peek()) == "{":
            yield from copy_value(source, sink.arguments)
        yield from source.until(_ENDS, sink.arguments, hold=BLANKS)
    elif channel is not None and channel[1] == "analysis":
        yield from source.until(_ENDS, write_reasoning)
    else:
        yield from source.until(_ENDS, sink.text)
