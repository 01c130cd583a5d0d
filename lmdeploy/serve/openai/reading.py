"""How the answers of one chat request are read: which parser, which control tokens it sees, which grammar.

Knows no format of calls and no fields of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmdeploy.engine.request import Grammar
from lmdeploy.errors import RequestError
from lmdeploy.runtime.structured import lark_expression
from lmdeploy.serve.openai.protocol import ChatBody
from lmdeploy.serve.openai.tools import ToolUse
from lmdeploy.serve.parsers.answer import PartStream
from lmdeploy.serve.parsers.forced import Calls, answer_grammar
from lmdeploy.serve.served import Served

_TAIL = 64  # tokens of a prompt that are looked at for the beginning of reasoning


@dataclass(frozen=True, slots=True)
class Reading:
    """The same for all answers of a request. prompt_end: text, with control tokens, before the answer."""

    served: Served
    body: ChatBody
    use: ToolUse
    prompt_end: str
    named_finish: str

    @property
    def printed(self) -> frozenset[int]:
        """Control tokens that the parser must see."""
        return self.served.parsers.printed(self.served.frontend.tokenizer)

    def stream(self) -> PartStream:
        """A reader for one answer."""
        use = self.use
        parser = self.served.parsers.parser(
            use.callable,
            self.prompt_end,
            separate=self.body.separate_reasoning is not False,
            forced=bool(use.forced),
        )
        return PartStream(
            parser,
            self.served.frontend.tokenizer.token_bytes,
            calls_end=self.named_finish if use.named else "tool_calls",
            one_call=use.named or self.body.parallel_tool_calls is False,
        )

    def grammar(self) -> Grammar | None:
        """What an answer must be beyond what the body's own grammar says: calls where they are required,
        calls or the shape asked for where both may come, reasoning in front of either.

        Raises RequestError.
        """
        asked = None if self.use.forced else self.body.grammar
        calls = self._calls() if self.use.forced or asked is not None else None
        reasoning = self.served.parsers.opens_reasoning(self.prompt_end)
        if calls is None and (asked is None or reasoning is None):
            return None
        text = None if asked is None else lark_expression(asked)
        if asked is not None and text is None:
            if calls is None:
                return None
            raise RequestError(
                "A grammar in Lark cannot be combined with 'tools'; set 'tool_choice' to \"none\".",
                param="tool_choice",
            )
        return Grammar("lark", answer_grammar(self.served.frontend.tokenizer, calls, text, reasoning))

    def _calls(self) -> Calls | None:
        use = self.use
        if use.shown is None or use.callable is None:
            return None
        names = use.forced or tuple(tool["function"]["name"] for tool in use.shown)
        parallel = not use.named and self.body.parallel_tool_calls is not False
        return Calls(use.shown, names, self.served.parsers.wire, parallel)


def prompt_end(served: Served, ids: Sequence[int], body: ChatBody) -> str:
    """The text right before an answer; of a turn that is continued only which mark of reasoning came last.

    `body.messages` must have been checked.
    """
    form = served.parsers.reasoning
    if body.continue_final_message and form is not None:
        turn = body.messages[-1]["content"]
        return form.opening if turn.rfind(form.opening) > turn.rfind(form.closing) else form.closing
    return served.frontend.tokenizer.decode(ids[-_TAIL:], skip_special_tokens=False)
