"""Which parsers a model's answers go through: by name, or by what its chat template writes.

Owns the names of the formats and the chain: reasoning first, then calls in the text that is left. Knows no
grammar of a format.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmdeploy.errors import ConfigError
from lmdeploy.serve.parsers import harmony
from lmdeploy.serve.parsers.base import Parser, Part, Text
from lmdeploy.serve.parsers.explain import (
    shows_calls,
    shows_tools,
    wants_short_ids,
    with_calls_as_text,
    with_short_ids,
    with_tools,
)
from lmdeploy.serve.parsers.forced import HERMES as HERMES_WIRE
from lmdeploy.serve.parsers.forced import WIRES, Wire
from lmdeploy.serve.parsers.reasoning import think
from lmdeploy.serve.parsers.reasoning.think import ReasoningFormat
from lmdeploy.serve.parsers.script import ScriptParser
from lmdeploy.serve.parsers.tool import json_objects, literals, markup, named
from lmdeploy.serve.parsers.tool.common import ToolFormat
from lmdeploy.serve.parsers.tools import ToolSet
from lmdeploy.text.tokenizer import Tokenizer

HARMONY = ToolFormat(harmony.NAMES, harmony.MARKS, harmony.found_in, harmony.script)
HARMONY_REASONING = ReasoningFormat(harmony.NAMES, "<|channel|>analysis", "<|end|>")

# In the order in which a template is asked: what one format is known by may also stand in a later one's.
TOOL_FORMATS = (
    HARMONY,
    markup.DEEPSEEK_V32,
    markup.DEEPSEEK_V4,
    named.DEEPSEEK,
    named.KIMI,
    named.MISTRAL,
    json_objects.INTERNLM,
    markup.GLM,
    markup.SEED,
    markup.MINIMAX,
    markup.QWEN3_CODER,
    literals.GEMMA4,
    literals.FUNCTION_GEMMA,
    json_objects.NEMOTRON,
    json_objects.TOOL_CALLS,
    json_objects.COMMAND,
    json_objects.GRANITE,
    literals.PYTHONIC,
    json_objects.HERMES,
    named.FUNCTION,
    json_objects.LLAMA3,
)
REASONING_FORMATS = (
    HARMONY_REASONING,
    think.MISTRAL,
    think.SEED,
    think.COMMAND,
    think.GEMMA4,
    think.THINK,
    think.THINK_FIRST,
)
AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class Parsers:
    """The formats of one model; None: what belongs to it stays in the text."""

    tool: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    wire: Wire = HERMES_WIRE  # how calls that must be made are spelled
    tools_in_words: bool = False  # the template knows nothing of tools
    calls_as_text: bool = False  # the template knows nothing of calls
    short_ids: bool = False  # the template takes ids of calls with nine characters only

    @property
    def line(self) -> str:
        """What a server says at its start."""
        tool = self.tool.names[0] if self.tool is not None else "not read"
        words = " (explained in words: the chat template has no tools)" if self.tools_in_words else ""
        reasoning = self.reasoning.names[0] if self.reasoning is not None else "not told apart"
        return f"tool calls: {tool}{words}; reasoning: {reasoning}"

    def fit(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None
    ) -> tuple[Sequence[dict[str, Any]], Sequence[dict[str, Any]] | None]:
        """Messages and tools as the chat template can take them: what it does not know is put into words."""
        if self.calls_as_text:
            messages = with_calls_as_text(messages)
        if self.short_ids:
            messages = with_short_ids(messages)
        if tools and self.tools_in_words:
            return with_tools(messages, tools), None
        return messages, tools

    def opens_reasoning(self, prompt_end: str) -> str | None:
        """The mark that ends the reasoning in which an answer to this prompt begins; None where none does."""
        form = self.reasoning
        return form.closing if form and form is not HARMONY_REASONING and form.opened_by(prompt_end) else None

    def parser(
        self,
        tools: ToolSet | None,
        prompt_end: str = "",
        separate: bool = True,
        forced: bool = False,
    ) -> Parser | None:
        """A parser for one answer, or None where nothing is to be parsed.

        tools: None when calls are not wanted. prompt_end: the end of the prompt, control tokens as text.
        separate: tell reasoning from the answer; else it stays in the text, where no calls are looked for.
        forced: the answer is calls, spelled as `wire` says.
        """
        tool = self._forced_tool() if forced else self.tool
        if tool is HARMONY or self.reasoning is HARMONY_REASONING:
            wanted = separate and self.reasoning is HARMONY_REASONING
            return ScriptParser(harmony.script(tools if tool is HARMONY else None, wanted))
        calls = ScriptParser(tool.script(tools)) if tool and tools is not None else None
        if self.reasoning is None:
            return calls
        opened = self.reasoning.opened_by(prompt_end)
        ends = tool.marks[:1] if tool and calls else ()
        return _Chain(ScriptParser(self.reasoning.script(opened, ends, separate)), calls, separate)

    def _forced_tool(self) -> ToolFormat:
        """The format that reads what `wire` spells."""
        return json_objects.HERMES if self.tool is None or self.wire is HERMES_WIRE else self.tool

    def marks(self) -> frozenset[str]:
        """Texts that must reach a parser even where they are control tokens."""
        formats = [f for f in (self.tool, self.reasoning) if f is not None]
        return frozenset(mark for format_ in formats for mark in format_.marks)

    def printed(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Control tokens that must reach a parser."""
        ids = (tokenizer.id_of(mark) for mark in self.marks())
        return frozenset(i for i in ids if i is not None and i in tokenizer.special_ids)


class _Chain:
    """A parser of reasoning, and one of calls for the text it leaves."""

    def __init__(self, reasoning: Parser, calls: Parser | None, separate: bool) -> None:
        self._reasoning, self._calls, self._separate = reasoning, calls, separate

    def feed(self, text: str) -> list[Part]:
        return self._on(self._reasoning.feed(text))

    def finish(self) -> list[Part]:
        parts = self._on(self._reasoning.finish())
        return [*parts, *(self._calls.finish() if self._calls else [])]

    def _on(self, parts: Iterable[Part]) -> list[Part]:
        out: list[Part] = []
        for part in parts:
            if isinstance(part, Text):
                out += self._calls.feed(part.text) if self._calls else [part]
            else:
                out.append(part if self._separate else Text(part.text))  # type: ignore[union-attr]
        return out


def choose(tool: str, reasoning: str, templates: Mapping[str, str]) -> Parsers:
    """The parsers named at the command line; `auto` asks the model's chat templates. Raises ConfigError."""
    texts = "\n".join(templates.values())
    calls = _choose("--tool-call-parser", tool, TOOL_FORMATS, texts)
    in_words = bool(templates) and not shows_tools(templates) and calls in (None, json_objects.HERMES)
    if in_words and tool == AUTO:
        calls = json_objects.HERMES
    return Parsers(
        calls,
        _choose("--reasoning-parser", reasoning, REASONING_FORMATS, texts),
        _wire(calls, texts),
        in_words and calls is not None,
        bool(templates) and not shows_calls(templates),
        wants_short_ids(templates),
    )


def _wire(tool: ToolFormat | None, template: str) -> Wire:
    if tool is named.MISTRAL and "[ARGS]" not in template:
        return WIRES["mistral-list"]
    if tool is named.DEEPSEEK and "```json" in template:
        return WIRES["deepseek-r1"]
    return WIRES.get(tool.names[0], HERMES_WIRE) if tool is not None else HERMES_WIRE


def names(formats: Sequence[Any]) -> list[str]:
    """What a flag may say, besides auto and none."""
    return [name for format_ in formats for name in format_.names]


def _choose(flag: str, name: str, formats: Sequence[Any], template: str) -> Any:
    name = name.lower().replace("_", "-")
    if name == NONE:
        return None
    for format_ in formats:
        if name in [own.replace("_", "-") for own in format_.names]:
            return format_
        if name == AUTO and format_.found_in(template):
            return format_
    if name == AUTO:
        return None
    listed = ", ".join((AUTO, NONE, *sorted(names(formats))))
    raise ConfigError(f"{flag} {name!r} is not known; there are {listed}")
