"""Reasoning between two marks in front of the answer.

Think tags: https://qwenlm.github.io/blog/qwen3 and https://github.com/deepseek-ai/DeepSeek-R1; Mistral:
https://docs.mistral.ai/capabilities/reasoning; the others: the models' chat templates.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lmdeploy.serve.parsers.script import BLANKS, Script, Sink, Source, Steps

_ANY = re.compile(r"(?s:.*)")


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """One way of telling reasoning from the answer. assumed: an answer begins in reasoning even unmarked."""

    names: tuple[str, ...]
    opening: str
    closing: str
    assumed: bool = False

    def found_in(self, template: str) -> bool:
        """Whether a chat template writes reasoning this way."""
        return self.opening.strip() in template and self.closing in template

    @property
    def marks(self) -> tuple[str, ...]:
        return self.opening.strip(), self.closing.strip()

    def opened_by(self, prompt: str) -> bool:
        """Whether a prompt that ends like this leaves the answer in reasoning."""
        prompt = prompt.rstrip()
        if self.assumed and not prompt.endswith(self.closing):
            return True
        return prompt.endswith(self.opening.rstrip())

    def script(self, opened: bool, ends: Sequence[str] = (), separate: bool = True) -> Script:
        """opened: the answer begins in reasoning. ends: marks of calls, which end it where a line begins.

        separate: without marks and the blanks beside them; else reasoning is told as it was written.
        """

        def script(source: Source, sink: Sink) -> Steps[None]:
            place = source.keep()
            yield from source.blanks()
            marked = yield from source.skip(self.opening)
            if not marked and not opened:
                source.back(place)
            elif not separate:
                sink.reasoning(source.since(place))
            source.release()
            if marked or opened:
                yield from self._read(ends, separate, source, sink)
            yield from source.copy(_ANY, sink.text)

        return script

    def _read(self, ends: Sequence[str], separate: bool, source: Source, sink: Sink) -> Steps[None]:
        marks = (self.closing, *("\n" + end for end in ends))
        if separate:
            yield from source.blanks()
        mark, held = yield from source.until(marks, sink.reasoning, hold=BLANKS)
        if mark and mark != self.closing:
            source.back(source.place - len(mark))
            mark = ""
        if separate:
            yield from source.blanks()
        else:
            sink.reasoning(held + mark)


THINK = ReasoningFormat(
    ("think", "qwen3", "glm45", "deepseek-v3", "deepseek-v31", "deepseek-v32", "deepseek-v4", "minimax-m2"),
    "<think>",
    "</think>",
)
THINK_FIRST = ReasoningFormat(
    ("default", "deepseek-r1", "qwen-qwq", "intern-s1"), "<think>", "</think>", assumed=True
)
MISTRAL = ReasoningFormat(("mistral",), "[THINK]", "[/THINK]")
SEED = ReasoningFormat(("seed-oss",), "<seed:think>", "</seed:think>")
COMMAND = ReasoningFormat(("command",), "<|START_THINKING|>", "<|END_THINKING|>")
GEMMA4 = ReasoningFormat(("gemma4",), "<|channel>thought\n", "<channel|>")
