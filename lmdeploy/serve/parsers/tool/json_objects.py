"""Calls as JSON objects with name and arguments.

Hermes and Qwen: https://github.com/NousResearch/Hermes-Function-Calling; Llama 3:
https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1; InternLM:
https://github.com/InternLM/InternLM/blob/main/chat/chat_format.md; the others: the models' chat templates.
"""

from __future__ import annotations

from lmdeploy.serve.parsers.script import Script, Sink, Source, Steps
from lmdeploy.serve.parsers.tool.common import (
    ToolFormat,
    among_text,
    holds,
    json_calls,
    read_json_call,
    read_to,
)
from lmdeploy.serve.parsers.tools import ToolSet

HERMES = ToolFormat(
    ("hermes", "qwen", "qwen2d5", "qwen3", "granite4"),
    ("<tool_call>", "</tool_call>"),
    lambda text: "<tool_call>" in text and "[<tool_call>" not in text,
    json_calls("<tool_call>", "</tool_call>"),
)
NEMOTRON = ToolFormat(
    ("nemotron",),
    ("<TOOLCALL>", "</TOOLCALL>"),
    holds("<TOOLCALL>"),
    json_calls("<TOOLCALL>", "</TOOLCALL>"),
)
TOOL_CALLS = ToolFormat(
    ("minimax-m1", "apriel"),
    ("<tool_calls>", "</tool_calls>"),
    holds("<tool_calls>", "</tool_calls>"),
    json_calls("<tool_calls>", "</tool_calls>"),
)
COMMAND = ToolFormat(
    ("command",),
    ("<|START_ACTION|>", "<|END_ACTION|>"),
    holds("<|START_ACTION|>"),
    json_calls("<|START_ACTION|>", "<|END_ACTION|>", names=("tool_name",), arguments=("parameters",)),
)
GRANITE = ToolFormat(
    ("granite", "phi4_mini_json"),
    ("<|tool_call|>", "<|/tool_call|>"),
    holds("<|tool_call|>"),
    json_calls("<|tool_call|>", "<|/tool_call|>"),
)

_ACTION, _PLUGIN, _ACTION_END = "<|action_start|>", "<|plugin|>", "<|action_end|>"


def _read_plugin(source: Source, sink: Sink, tools: ToolSet, mark: str) -> Steps[bool]:
    yield from source.blanks()
    if not (yield from source.skip(_PLUGIN)):
        return False
    yield from source.blanks()
    told = sink.calls
    if not (yield from read_json_call(source, sink)):
        return (yield from read_to(source, sink, (_ACTION_END,), sink.calls > told))
    yield from source.blanks()
    yield from source.skip(_ACTION_END)
    return True


INTERNLM = ToolFormat(
    ("internlm", "intern-s1"),
    (_ACTION, _PLUGIN, _ACTION_END),
    holds(_ACTION),
    among_text((_ACTION,), _read_plugin),
)

_PYTHON_TAG = "<|python_tag|>"


def _llama_script(tools: ToolSet) -> Script:
    """Objects at the very beginning, or behind a mark. No mark ends them, so only known names count."""

    def script(source: Source, sink: Sink) -> Steps[None]:
        place = source.keep()
        called = yield from _read_bare(source, sink, tools, "")
        if not called:
            source.back(place)
        source.release()
        yield from rest(source, sink)

    rest = among_text((_PYTHON_TAG,), _read_bare)(tools)
    return script


def _read_bare(source: Source, sink: Sink, tools: ToolSet, mark: str) -> Steps[bool]:
    """Objects, perhaps in a list, with `;`, a comma or blanks between them."""
    before = sink.calls
    yield from source.blanks()
    yield from source.skip(_PYTHON_TAG)
    while True:
        yield from source.blanks()
        if (yield from source.skip("[", ",", ";")):
            continue
        if (yield from source.peek()) != "{":
            yield from source.skip("]")
            return sink.calls > before
        told, place = sink.calls, source.place
        if not (yield from read_json_call(source, sink, known=tools)):
            if sink.calls > told:
                yield from source.until(("<|eot_id|>", "<|eom_id|>"), sink.arguments)
            else:
                source.back(place)
            return sink.calls > before


LLAMA3 = ToolFormat(
    ("llama3", "llama3_json", "llama4_json"),
    (_PYTHON_TAG,),
    lambda text: "<|start_header_id|>" in text and '"parameters"' in text,
    _llama_script,
)
