"""How large the things are that a chat template makes: filters, methods and operators are weighed first.

Jinja's filters and Python's string methods can turn a few characters into gigabytes within one call, where no
clock is looked at. Each one that multiplies is given here with the size of its result.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
from jinja2.filters import FILTERS, make_attrgetter

LENGTH_LIMIT = 32 << 20  # characters of one rendering, and of any text made on the way
COUNT_LIMIT = 1 << 20  # entries of a list, and parts of a value that becomes text

_HUGE_WIDTH = re.compile(r"[%{:.][^%{}a-zA-Z]*[0-9]{7}")
_LONGEST_INDENT = 64  # blanks of JSON


class TemplateFailure(Exception):
    """A template could not be compiled or rendered; the text says why, in one line."""


def check_length(length: int) -> None:
    if length > LENGTH_LIMIT:
        raise TemplateFailure(f"the chat template made a text of more than {LENGTH_LIMIT} characters")


def check_count(count: int) -> None:
    if count > COUNT_LIMIT:
        raise TemplateFailure(f"the chat template made a list of more than {COUNT_LIMIT} entries")


def check_widths(form: str) -> None:
    """Format widths and precisions, as in '%99999999d'."""
    if _HUGE_WIDTH.search(form):
        raise TemplateFailure("a width in a text of the chat template is too large")


def text_length(value: Any) -> int:
    """About the length of `value` as text. TemplateFailure when that is beyond the limits; lists that hold
    one another many times over are not walked to their end."""
    length, parts, left = 0, 0, [value]
    while left:
        item = left.pop()
        parts += 1
        check_count(parts)
        if isinstance(item, str):
            length += len(item)
            check_length(length)
        elif isinstance(item, Mapping):
            left += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            check_count(parts + len(left) + len(item))
            left += item
    return length + 8 * parts


def weighed(value: Any) -> Any:
    """`value`, which may become text."""
    if not isinstance(value, str):
        text_length(value)
    return value


def check_method(owner: str, name: str, arguments: tuple[Any, ...]) -> None:
    """Before a string method runs: TemplateFailure when its result would be too large."""
    check_length(max([0, *(value for value in arguments if isinstance(value, int))]))
    if name == "replace" and len(arguments) > 1:
        check_length(_replaced(owner, *arguments[:2]))
    elif name == "join" and arguments and isinstance(arguments[0], list | tuple):
        check_length(text_length(arguments[0]) + len(owner) * len(arguments[0]))
    elif name in ("format", "format_map"):
        check_widths(owner)
        check_length(len(owner) + owner.count("{") * text_length(arguments))
    elif name == "expandtabs":
        check_length(len(owner) + owner.count("\t") * (arguments[0] if arguments else 8))
    elif name == "translate" and arguments:
        check_length(len(owner) * max(1, text_length(arguments)))


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Before an operator runs: TemplateFailure when its result would be too large."""
    if operator == "**" and (abs(left) > 1 << 20 or abs(right) > 64):
        raise TemplateFailure("a power in the chat template is too large")
    if operator == "*":
        _check_product(left, right)
    elif operator == "%" and isinstance(left, str):
        check_widths(left)
        check_length(len(left) + left.count("%") * text_length(right))
    elif operator == "+" and isinstance(left, str) and isinstance(right, str):
        check_length(len(left) + len(right))
    elif operator == "+" and isinstance(left, list | tuple) and isinstance(right, list | tuple):
        check_count(len(left) + len(right))


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > 1 << 12:
            raise TemplateFailure("a number in the chat template is too large")
        return
    for text, count in ((left, right), (right, left)):
        if isinstance(count, int) and isinstance(text, str):
            check_length(len(text) * count)
        elif isinstance(count, int) and isinstance(text, list | tuple):
            check_count(len(text) * count)


def _replaced(text: str, old: Any, new: Any) -> int:
    if not isinstance(old, str) or not isinstance(new, str):
        return 0
    return len(text) + text.count(old) * max(0, len(new) - len(old))


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON without HTML escapes, as the models' templates expect of `tojson`."""
    text_length(value)
    if (len(indent) if isinstance(indent, str) else indent or 0) > _LONGEST_INDENT:
        raise TemplateFailure("the indent of tojson in the chat template is too large")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _join(environment: jinja2.Environment, value: Any, d: Any = "", attribute: Any = None) -> str:
    items = list(value)
    if attribute is not None:
        items = list(map(make_attrgetter(environment, attribute), items))
    check_length(text_length(items) + len(str(d)) * len(items))
    return str(d).join(map(str, items))


def _indent_size(text: Any, width: Any = 4, *_: Any, **__: Any) -> int:
    blanks = len(width) if isinstance(width, str) else int(width)
    return len(str(text)) + (str(text).count("\n") + 1) * blanks


def _wrap_size(text: Any, width: int = 79, _: bool = True, wrapstring: Any = None, *__: Any) -> int:
    return len(text) * max(1, len(wrapstring or ""))


def _entries(_: Any, count: int, *__: Any, **___: Any) -> int:
    check_count(count)
    return 0


def _sum(_: Any, __: Any = None, start: Any = 0) -> int:
    if not isinstance(start, int | float):
        raise TemplateFailure("sum in a chat template adds numbers only")
    return 0


def _format_size(form: str, *arguments: Any, **named: Any) -> int:
    check_widths(form)
    return len(form) + form.count("%") * text_length([arguments, named])


# Filter -> length of its result, from the arguments the template gives.
_SIZES: dict[str, Callable[..., int]] = {
    "center": lambda text, width=80: width,
    "indent": _indent_size,
    "replace": lambda text, old, new, count=None: _replaced(str(text), str(old), str(new)),
    "wordwrap": _wrap_size,
    "batch": _entries,
    "slice": _entries,
    "sum": _sum,
    "format": _format_size,
}
_MAKE_TEXT = (
    "string", "pprint", "escape", "e", "forceescape", "safe", "upper", "lower", "title", "trim", "capitalize",
    "striptags", "truncate", "urlencode", "xmlattr", "wordcount", *_SIZES,
)  # fmt: skip


def limited_filters() -> dict[str, Callable[..., Any]]:
    """Jinja's filters, each refusing what would be too large; `urlize`, which no chat needs, is left out."""
    filters: dict[str, Callable[..., Any]] = {**FILTERS}
    for name in _MAKE_TEXT:
        filters[name] = _limited(filters[name], _SIZES.get(name))
    del filters["urlize"]
    return filters | {"tojson": to_json, "join": jinja2.pass_environment(_join)}


def _limited(run: Callable[..., Any], size: Callable[..., int] | None) -> Callable[..., Any]:
    """Some filters are given the environment or a context before the value."""
    first = 1 if hasattr(run, "jinja_pass_arg") else 0

    @functools.wraps(run)
    def limited(*arguments: Any, **named: Any) -> Any:
        weighed(arguments[first])
        if size is not None:
            check_length(size(*arguments[first:], **named))
        return run(*arguments, **named)

    return limited
