"""The environment chat templates run in: sandboxed, with the names models expect, bounded in time and size.

Knows nothing of messages or tokens. Templates come with a model, so they are data of a stranger: no attribute
of Python's machinery is reachable, loops and macros check a deadline, and texts made by operators, methods
and output have a limit.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lmdeploy.text.jinja_limits import (
    TemplateFailure,
    check_length,
    check_method,
    check_operator,
    limited_filters,
    text_length,
    to_json,
    weighed,
)

TIME_LIMIT = 2.0  # seconds of computing for one rendering

_PRIVATE = re.compile(r"\\u(e[0-9a-f]{3}|f[0-8][0-9a-f]{2})")
_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)


class _Generation(Extension):
    """`{% generation %}`: marks the assistant's words for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012  (the base class's protocol)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """Counts the cost of what a template does."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=weighed
        )
        self.filters = {**limited_filters(), "tojson": _to_json}
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        del self.globals["lipsum"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _instrumented(super()._parse(source, name, filename))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *arguments: Any, **named: Any) -> Any:
        method = getattr(function, "__wrapped__", function)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            check_method(owner, getattr(method, "__name__", ""), (*arguments, *named.values()))
        return super().call(context, function, *arguments, **named)


class CompiledTemplate:
    """One template, compiled once; `render` may be called from several threads."""

    def __init__(self, source: str) -> None:
        try:
            self._template = _Environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateFailure(f"line {error.lineno}: {error.message}") from None
        except (RecursionError, TypeError) as error:
            raise TemplateFailure(f"cannot be compiled: {error}") from None

    def render(self, variables: Mapping[str, Any], time_limit: float = TIME_LIMIT) -> str:
        """The text; TemplateFailure with the template's own words when it raises one or goes wrong."""
        tick = _deadline(time_limit)
        pieces, length = [], 0
        try:
            for piece in self._template.generate(variables, __tick=tick, __join=_join):
                tick()
                length += len(piece)
                check_length(length)
                pieces.append(piece)
        except _FAILURES as error:
            raise TemplateFailure(_one_line(error)) from None
        return "".join(pieces)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Characters of private use stay as they are: marks for user text must survive the template."""
    text = to_json(value, ensure_ascii, **options)
    return _PRIVATE.sub(lambda match: chr(int(match[1], 16)), text) if ensure_ascii else text


def _raise(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _deadline(seconds: float) -> Callable[[], None]:
    # Time of this thread, so that a busy machine does not fail a sound template.
    end = time.thread_time() + seconds

    def tick() -> None:
        if time.thread_time() > end:
            raise TemplateFailure(f"the chat template ran longer than {seconds:g} seconds")

    return tick


def _join(*parts: object) -> str:
    check_length(text_length(parts))
    return "".join(map(str, parts))


def _instrumented(template: nodes.Template) -> nodes.Template:
    """Each turn of a loop and each call of a macro checks the deadline; `~` checks the length."""
    blocks: list[Any] = list(template.find_all((nodes.For, nodes.Macro)))
    for block in blocks:
        block.body.insert(0, nodes.ExprStmt(_call("__tick", [], block.lineno), lineno=block.lineno))
    for parent in list(template.find_all(nodes.Node)):
        for field, value in parent.iter_fields():
            if isinstance(value, nodes.Concat):
                setattr(parent, field, _call("__join", value.nodes, value.lineno))
            elif isinstance(value, list):
                value[:] = [
                    _call("__join", v.nodes, v.lineno) if isinstance(v, nodes.Concat) else v for v in value
                ]
    assert template.environment is not None
    template.set_environment(template.environment)
    return template


def _call(name: str, arguments: list[Any], line: int) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load", lineno=line), arguments, [], None, None, lineno=line)


def _one_line(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "the chat template calls itself without end"
    return " ".join(str(error).split()) or type(error).__name__
