"""Calls as markup with one element for each parameter, whose value is written without quotes.

Qwen3-Coder: https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct; GLM:
https://huggingface.co/zai-org/GLM-4.6; DeepSeek V3.2: https://huggingface.co/deepseek-ai/DeepSeek-V3.2; the
others: the models' chat templates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lmdeploy.serve.parsers.script import Script, Sink, Source, Steps
from lmdeploy.serve.parsers.tool.common import ToolFormat, among_text, holds
from lmdeploy.serve.parsers.tool.named import read_name, read_until
from lmdeploy.serve.parsers.tools import ToolSet, to_json


@dataclass(frozen=True, slots=True)
class Markup:
    """Where things begin and end.

    opening and closing surround all calls of a section; call and call_end one call, whose name is followed
    by name_end ("": a line end or the first parameter). key is in front of a parameter's name; key_ends
    behind it say whether the value is text (True), JSON (False) or of the tool's own kind (None). value:
    between name and value, where it is more than key_ends.
    """

    opening: str
    closing: str
    call: str
    name_end: str
    call_end: str
    key: str
    key_ends: dict[str, bool | None]
    value_end: str
    value: str = ""

    @property
    def starts(self) -> tuple[str, ...]:
        """A call may stand without its section."""
        return tuple(mark for mark in (self.opening, self.call) if mark)

    @property
    def marks(self) -> tuple[str, ...]:
        texts = (self.opening, self.closing, self.call, self.call_end, self.key, self.value_end, self.value)
        return tuple(dict.fromkeys(text for text in (*texts, *self.key_ends) if len(text) > 2))

    def script(self) -> Callable[[ToolSet], Script]:
        def read_call(source: Source, sink: Sink, tools: ToolSet, mark: str) -> Steps[bool]:
            return (yield from _read_section(self, source, sink, tools, mark))

        return among_text(self.starts, read_call)


def _read_section(markup: Markup, source: Source, sink: Sink, tools: ToolSet, mark: str) -> Steps[bool]:
    before = sink.calls
    inside = not markup.call or mark == markup.call
    while True:
        yield from source.blanks()
        if not inside and not (yield from source.skip(markup.call)):
            yield from source.skip(markup.closing)
            return sink.calls > before
        if not (yield from _read_call(markup, source, sink, tools)):
            return sink.calls > before
        inside = False
        if not markup.call:  # then a section holds one call
            return True


def _read_call(markup: Markup, source: Source, sink: Sink, tools: ToolSet) -> Steps[bool]:
    """The name and the parameters of one call; False where there is no name."""
    ends = (markup.name_end,) if markup.name_end else ("\n", markup.key, markup.closing)
    name, mark = yield from read_name(source, ends)
    if not name:
        return False
    if mark in (markup.key, markup.closing):
        source.back(source.place - len(mark))
    sink.call(name)
    sink.arguments("{")
    before = ""
    while True:
        yield from source.blanks()
        if not (yield from source.skip(markup.key)):
            break
        if not (yield from _read_parameter(markup, source, sink, tools, name, before)):
            return True  # cut off, and so are the arguments
        before = ", "
    ending = yield from source.skip(*(end for end in (markup.call_end, markup.closing) if end))
    if ending or (yield from source.peek()):
        sink.arguments("}")
    return True


def _read_parameter(
    markup: Markup, source: Source, sink: Sink, tools: ToolSet, name: str, before: str
) -> Steps[bool]:
    """One parameter from its name on, told with `before` in front; False where the text ends in it."""
    key, mark = yield from read_until(source, tuple(markup.key_ends))
    if not mark:
        return False
    if markup.value:
        yield from source.blanks()
        yield from source.skip(markup.value)
    sink.arguments(before + to_json(key) + ": ")
    as_text = markup.key_ends[mark]
    if as_text or (as_text is None and tools.only_text(name, key)):
        sink.arguments('"')
        good = yield from _copy_raw(markup, source, lambda text: sink.arguments(to_json(text)[1:-1]))
        sink.arguments('"' if good else "")
        return good
    pieces: list[str] = []
    good = yield from _copy_raw(markup, source, pieces.append)
    text = "".join(pieces)
    sink.arguments(tools.from_text(name, key, text) if good else text)
    return good


def _copy_raw(markup: Markup, source: Source, write: Callable[[str], None]) -> Steps[bool]:
    """The value without the line ends that surround it, one on each side. False where the text ends in it."""
    lines = yield from source.skip("\n")
    # A model that forgets to end a value goes on with the next parameter or ends the call.
    ends = tuple(e for e in (markup.value_end, markup.call_end, markup.closing) if e)
    mark, held = yield from source.until(ends, write, hold="\n" if lines else "")
    if held[:-1]:
        write(held[:-1])
    if mark != markup.value_end:
        source.back(source.place - len(mark))
    return mark != ""


_QWEN3_CODER = Markup(
    "<tool_call>",
    "</tool_call>",
    "<function=",
    ">",
    "</function>",
    "<parameter=",
    {">": None},
    "</parameter>",
)
_SEED = Markup(
    "<seed:tool_call>",
    "</seed:tool_call>",
    "<function=",
    ">",
    "</function>",
    "<parameter=",
    {">": None},
    "</parameter>",
)
_MINIMAX = Markup(
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    '<invoke name="',
    '">',
    "</invoke>",
    '<parameter name="',
    {'">': None},
    "</parameter>",
)
_GLM = Markup(
    "<tool_call>",
    "</tool_call>",
    "",
    "",
    "",
    "<arg_key>",
    {"</arg_key>": None},
    "</arg_value>",
    "<arg_value>",
)


def _dsml(section: str) -> Markup:
    return Markup(
        f"<｜DSML｜{section}>",
        f"</｜DSML｜{section}>",
        '<｜DSML｜invoke name="',
        '">',
        "</｜DSML｜invoke>",
        '<｜DSML｜parameter name="',
        {'" string="true">': True, '" string="false">': False},
        "</｜DSML｜parameter>",
    )


_V32, _V4 = _dsml("function_calls"), _dsml("tool_calls")


def _format(names: tuple[str, ...], markup: Markup, found_in: Callable[[str], bool]) -> ToolFormat:
    return ToolFormat(names, markup.marks, found_in, markup.script())


QWEN3_CODER = _format(
    ("qwen3coder", "qwen3-coder", "interns2-preview", "nemotron3", "step3p5"),
    _QWEN3_CODER,
    lambda text: "<function=" in text and "<parameter=" in text and "<tool_call>" in text,
)
SEED = _format(("seed-oss",), _SEED, holds("<seed:tool_call>", "</parameter>"))
MINIMAX = _format(("minimax-m2",), _MINIMAX, holds("minimax:tool_call", "<invoke name="))
GLM = _format(("glm45", "glm46", "glm47"), _GLM, holds("<arg_key>", "<tool_call>"))
DEEPSEEK_V32 = _format(("deepseek-v32",), _V32, holds("DSML｜", "function_calls>"))
DEEPSEEK_V4 = _format(("deepseek-v4",), _V4, holds("DSML｜", "tool_calls>"))
