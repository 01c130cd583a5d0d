"""The grammar of an answer that must be calls, or a text of some shape, or one of both, behind reasoning.

Owns how each format of calls is spelled for the grammar. A text that is a control token of the model becomes
that token. Knows no compiler of grammars.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmdeploy.text.tokenizer import Tokenizer

NAME = "\0"  # stands for the tool's name in a head


@dataclass(frozen=True, slots=True)
class Wire:
    """begin, then calls with `between` in between, then end; a call is head (NAME within), JSON, tail."""

    head: str
    tail: str
    between: str | None = ""  # None: only one call
    begin: str = ""
    end: str = ""


HERMES = Wire(f'<tool_call>\n{{"name": "{NAME}", "arguments": ', "}\n</tool_call>", "\n")
WIRES: dict[str, Wire] = {
    "hermes": HERMES,
    "nemotron": Wire(f'{{"name": "{NAME}", "arguments": ', "}", ", ", "<TOOLCALL>[", "]</TOOLCALL>"),
    "minimax-m1": Wire(f'{{"name": "{NAME}", "arguments": ', "}", "\n", "<tool_calls>\n", "\n</tool_calls>"),
    "command": Wire(
        f'{{"tool_call_id": "0", "tool_name": "{NAME}", "parameters": ',
        "}",
        ", ",
        "<|START_ACTION|>[",
        "]<|END_ACTION|>",
    ),
    "granite": Wire(f'{{"name": "{NAME}", "arguments": ', "}", ", ", "<|tool_call|>[", "]"),
    "internlm": Wire(
        f'<|action_start|><|plugin|>\n{{"name": "{NAME}", "parameters": ', "}<|action_end|>", "\n"
    ),
    "llama3": Wire(f'{{"name": "{NAME}", "parameters": ', "}", "; "),
    "functionary": Wire(f"<function={NAME}>", "</function>"),
    "mistral": Wire(f"[TOOL_CALLS]{NAME}[ARGS]", ""),
    "mistral-list": Wire(f'{{"name": "{NAME}", "arguments": ', "}", ", ", "[TOOL_CALLS][", "]"),
    "deepseek-v3": Wire(
        f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek-r1": Wire(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        "\n",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "kimi-k2": Wire(
        f"<|tool_call_begin|>functions.{NAME}:0<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
    "gpt-oss": Wire(f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>", "", None),
}
_SCHEMA_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls of the tools `names`, whose arguments follow their schemas; parallel: one after another.

    Keywords that cannot be enforced are left out unless the tool is strict.
    """

    tools: Sequence[Mapping[str, Any]]
    names: Sequence[str]
    wire: Wire
    parallel: bool


def answer_grammar(
    tokenizer: Tokenizer, calls: Calls | None, text: str | None, reasoning: str | None = None
) -> str:
    """A Lark grammar of an answer that is calls, or what the expression `text` stands for; either if both.

    reasoning: the mark that ends the reasoning in which the answer begins, if it does.
    """
    spell = _Spelling(tokenizer)
    kinds = [name for name, given in (("calls", calls), ("text", text)) if given is not None]
    rules = [f"start: {'thought gap? ' if reasoning else ''}answer", f"answer: {' | '.join(kinds)}"]
    if reasoning:
        # Models are trained to leave lines between reasoning and answer.
        rules += [spell.anything_up_to("thought", reasoning), 'gap: "\\n\\n" | "\\n"']
    if text is not None:
        rules.append(f"text: {text}")
    if calls is not None:
        rules += _call_rules(calls, spell)
    return "\n".join(rules) + "\n"


def _call_rules(calls: Calls, spell: _Spelling) -> list[str]:
    wire = calls.wire
    functions = [t["function"] for t in calls.tools if t["function"]["name"] in calls.names]
    more = f" ({spell.text(wire.between)} call)*" if calls.parallel and wire.between is not None else ""
    rules = [
        f"calls: {spell.text(wire.begin)} call{more} {spell.text(wire.end)}",
        "call: " + " | ".join(f"call_{i}" for i in range(len(functions))),
    ]
    for i, function in enumerate(functions):
        head = spell.text(wire.head.replace(NAME, function["name"]))
        rules.append(f"call_{i}: {head} %json {_schema(function)} {spell.text(wire.tail)}")
    return rules


def _schema(function: Mapping[str, Any]) -> str:
    schema = {"type": "object", **function["parameters"]}
    options = {**_SCHEMA_OPTIONS, "lenient": function.get("strict") is not True}
    return json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


class _Spelling:
    """Texts as a grammar has them: quoted, with control tokens by their ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special: re.Pattern[str] | None = tokenizer.special_pattern

    def text(self, text: str | None) -> str:
        if not text:
            return ""
        if self._special is None:
            return _quoted(text)
        out, at = [], 0
        for match in self._special.finditer(text):
            out += [_quoted(text[at : match.start()]), f"<[{self._tokenizer.id_of(match[0])}]>"]
            at = match.end()
        return " ".join(filter(None, [*out, _quoted(text[at:])]))

    def anything_up_to(self, rule: str, mark: str) -> str:
        """A rule for any text up to and with the first `mark`."""
        if self._special is not None and self._special.fullmatch(mark):
            return f"{rule}: /(.|\\n)*/ {self.text(mark)}"
        escaped = re.escape(mark).replace("/", "\\/")
        return f"{rule}[lazy]: /(.|\\n)*{escaped}/"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
