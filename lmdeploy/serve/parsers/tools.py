"""The tools of one request, as parsers need them: names, and which kinds of values a parameter takes.

Knows no format.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from lmdeploy.errors import text_problem

_KINDS = {dict: "object", list: "array", bool: "boolean", int: "integer", float: "number", str: "string"}


class ToolSet:
    """Made of checked `tools` of a request."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        functions = [tool["function"] for tool in tools]
        self.names = frozenset(function["name"] for function in functions)
        self._properties = {f["name"]: _properties(f.get("parameters")) for f in functions}

    def only_text(self, name: str, key: str) -> bool:
        """Whether parameter `key` of tool `name` takes strings and nothing else."""
        return self._kinds(name, key) == {"string"}

    def from_text(self, name: str, key: str, text: str) -> str:
        """A value that a model wrote without quotes, as JSON text of a kind the parameter takes.

        Where the tool does not say, what reads as JSON (or as a Python literal) is meant so.
        """
        kinds = self._kinds(name, key)
        if kinds == {"string"}:
            return to_json(text)
        read, value = read_literal(text)
        fits = not kinds or _KINDS.get(type(value), "null") in kinds or _is_number(value, kinds)
        return to_json(value if read and fits else text)

    def _kinds(self, name: str, key: str) -> set[str]:
        """JSON types; empty when anything goes."""
        schema = self._properties.get(name, {}).get(key)
        return _kinds(schema) if isinstance(schema, Mapping) else set()


def _properties(parameters: Any) -> Mapping[str, Any]:
    found = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {k for k in kind if isinstance(k, str)}
    if isinstance(values := schema.get("enum"), list):
        return {_KINDS.get(type(value), "null") for value in values}
    for name in ("anyOf", "oneOf"):
        options = schema.get(name)
        if isinstance(options, list) and all(isinstance(o, Mapping) for o in options):
            found = [_kinds(option) for option in options]
            return set().union(*found) if all(found) else set()
    return set()


def _is_number(value: Any, kinds: set[str]) -> bool:
    return "number" in kinds and isinstance(value, int) and not isinstance(value, bool)


def read_literal(text: str) -> tuple[bool, Any]:
    """(whether it is JSON or a Python literal that JSON can hold, its value)."""
    try:
        return True, json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        value = ast.literal_eval(text.strip())
        to_json(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False, None
    return True, value


def to_json(value: Any) -> str:
    """Raises ValueError and TypeError for what JSON cannot hold."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if text_problem(text) is None else json.dumps(value, allow_nan=False)
