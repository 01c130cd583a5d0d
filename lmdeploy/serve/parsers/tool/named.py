"""Calls as a name and then the arguments as JSON.

DeepSeek V3, R1 and V3.1: https://huggingface.co/deepseek-ai/DeepSeek-V3.1#toolcall; Mistral:
https://docs.mistral.ai/capabilities/function_calling and mistral-common's tokenizers; Kimi K2:
https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/docs/tool_call_guidance.md; `<function=`:
https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1 (user-defined custom tool calling).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from lmdeploy.serve.parsers.script import Sink, Source, Steps
from lmdeploy.serve.parsers.tool.common import (
    ToolFormat,
    among_text,
    holds,
    read_arguments,
    read_json_call,
    read_to,
)
from lmdeploy.serve.parsers.tools import ToolSet

_NAME = re.compile(r"[\w.\-:/]{1,256}")


def read_name(source: Source, ends: Sequence[str]) -> Steps[tuple[str, str]]:
    """A tool's name and the mark behind it, ("", "") where there is none."""
    name, mark = yield from read_until(source, ends)
    return (name, mark) if _NAME.fullmatch(name) else ("", "")


def read_until(source: Source, ends: Sequence[str]) -> Steps[tuple[str, str]]:
    """The text before the first of `ends` on this line, trimmed, and that mark; ("", "") without one."""
    pieces: list[str] = []
    mark, _ = yield from source.until((*ends, "\n"), pieces.append)
    return ("".join(pieces).strip(), mark) if mark in ends else ("", "")


def read_named(source: Source, sink: Sink, name_end: str, closing: Sequence[str]) -> Steps[bool]:
    """`NAME` + name_end + arguments + closing mark; text of a call that breaks off goes on to that mark."""
    name, _ = yield from read_name(source, (name_end,))
    return name != "" and (yield from read_rest(source, sink, name, closing))


def read_rest(source: Source, sink: Sink, name: str, closing: Sequence[str]) -> Steps[bool]:
    """The arguments of `name`, and the closing mark behind them if it is there."""
    yield from source.blanks()
    told = sink.calls
    if not (yield from read_arguments(source, sink, name)):
        return (yield from read_to(source, sink, closing, sink.calls > told))
    yield from source.blanks()
    yield from source.skip(*closing)
    return True


_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


def _read_deepseek(source: Source, sink: Sink, tools: ToolSet, mark: str) -> Steps[bool]:
    before = sink.calls
    while True:
        yield from source.blanks()
        if (yield from source.skip(_CALLS_END)) or not (yield from source.skip(_CALL)):
            return sink.calls > before
        name, _ = yield from read_name(source, (_SEP,))
        if name == "function":  # the older form: kind, name, a block of code
            name, _ = yield from read_name(source, ("\n",))
            yield from source.blanks()
            yield from source.skip("```json")
        told = sink.calls
        if not name or not (yield from read_rest(source, sink, name, ("```", _CALL_END))):
            return sink.calls > before
        assert sink.calls > told
        yield from source.blanks()
        yield from source.skip(_CALL_END)


DEEPSEEK = ToolFormat(
    ("deepseek-v3", "deepseek-v31", "deepseek-r1"),
    (_CALLS, _CALLS_END, _CALL, _CALL_END, _SEP),
    holds(_CALL),
    among_text((_CALLS,), _read_deepseek),
)

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI, _KIMI_ARGUMENTS, _KIMI_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def _read_kimi(source: Source, sink: Sink, tools: ToolSet, mark: str) -> Steps[bool]:
    before = sink.calls
    while True:
        yield from source.blanks()
        if (yield from source.skip(_SECTION_END)) or not (yield from source.skip(_KIMI)):
            return sink.calls > before
        label, _ = yield from read_name(source, (_KIMI_ARGUMENTS,))  # functions.NAME:NUMBER
        name = label.removeprefix("functions.").rpartition(":")[0]
        if not name or not (yield from read_rest(source, sink, name, (_KIMI_END,))):
            return sink.calls > before


KIMI = ToolFormat(
    ("kimi-k2",),
    (_SECTION, _SECTION_END, _KIMI, _KIMI_ARGUMENTS, _KIMI_END),
    holds(_SECTION),
    among_text((_SECTION,), _read_kimi),
)

_MISTRAL, _MISTRAL_ID, _MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_MISTRAL_END = "</s>"


def _read_mistral(source: Source, sink: Sink, tools: ToolSet, mark: str) -> Steps[bool]:
    """A list of objects, or NAME[ARGS]{...} perhaps with an id between, or NAME{...}."""
    yield from source.blanks()
    if (yield from source.peek()) == "[":
        return (yield from _read_mistral_list(source, sink))
    name, mark = yield from read_name(source, (_MISTRAL_ID, _MISTRAL_ARGUMENTS, "{"))
    if mark == _MISTRAL_ID:
        yield from read_until(source, (_MISTRAL_ARGUMENTS,))
    elif mark == "{":
        source.back(source.place - 1)
    if not name:
        return False
    yield from source.blanks()
    told = sink.calls
    if not (yield from read_arguments(source, sink, name)):
        return (yield from read_to(source, sink, (_MISTRAL_END,), sink.calls > told))
    return True


def _read_mistral_list(source: Source, sink: Sink) -> Steps[bool]:
    before = sink.calls
    while True:
        yield from source.blanks()
        if (yield from source.skip("[", ",")):
            continue
        if (yield from source.skip("]")) or (yield from source.peek()) != "{":
            return sink.calls > before
        told = sink.calls
        if not (yield from read_json_call(source, sink)):
            yield from read_to(source, sink, (_MISTRAL_END,), sink.calls > told)
            return sink.calls > before


MISTRAL = ToolFormat(
    ("mistral",),
    (_MISTRAL, _MISTRAL_ID, _MISTRAL_ARGUMENTS),
    holds(_MISTRAL),
    among_text((_MISTRAL,), _read_mistral),
)

_FUNCTION, _FUNCTION_END = "<function=", "</function>"


def _read_function(source: Source, sink: Sink, tools: ToolSet, mark: str) -> Steps[bool]:
    return (yield from read_named(source, sink, ">", (_FUNCTION_END,)))


FUNCTION = ToolFormat(
    ("functionary", "llama3_user_defined"),
    (_FUNCTION, _FUNCTION_END),
    lambda text: "<function=" in text and "<parameter=" not in text,
    among_text((_FUNCTION,), _read_function),
)
