"""JSON in an answer, and whether it is what was asked for: the part of JSON Schema that questions need."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from lmdeploy.errors import ConfigError

_FENCE = re.compile(r"```[a-zA-Z0-9_+-]*[ \t]*\n(.*?)```", re.S)
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_ANNOTATIONS = {"title", "description", "$schema", "default", "examples"}
_KNOWN = _ANNOTATIONS | {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "enum",
    "const",
    "minItems",
    "maxItems",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "pattern",
}


def fenced(text: str) -> str | None:
    """What the first closed code fence holds."""
    found = _FENCE.search(text)
    return found[1] if found else None


def json_problem(text: str, schema: Mapping[str, Any]) -> tuple[bool, str | None]:
    """Whether the answer is JSON at all (alone or in one code fence; a sentence around it is not), and the
    first way in which it differs from the schema."""
    body = fenced(text)
    try:
        value = json.loads((text if body is None else body).strip(), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error) or "nested too deeply"
        return False, f"no JSON: {reason}"
    return True, next(differences(value, schema), None)


def check_schema(schema: Any, where: str = "json_schema") -> None:
    """ConfigError names what is not supported, so that no rule is silently left out."""
    if not isinstance(schema, dict):
        raise ConfigError(f"{where} must be an object")
    for key in schema.keys() - _KNOWN:
        raise ConfigError(f"{where}: {key!r} is not supported (supported: {', '.join(sorted(_KNOWN))})")
    kind = schema.get("type")
    for name in [kind] if isinstance(kind, str) else kind or []:
        if name not in _TYPES:
            raise ConfigError(f"{where}: type {name!r} is none of {', '.join(_TYPES)}")
    _check_pattern(schema.get("pattern"), where)
    for name, part in schema.get("properties", {}).items():
        check_schema(part, f"{where}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            check_schema(schema[key], f"{where}.{key}")


def _check_pattern(pattern: Any, where: str) -> None:
    try:
        re.compile(pattern or "")
    except (re.error, TypeError) as error:
        raise ConfigError(f"{where}: pattern is no regular expression: {error}") from None


def differences(value: Any, schema: Mapping[str, Any], where: str = "$") -> Iterator[str]:
    """In what a value is not what the schema says."""
    kinds = schema.get("type")
    names = [kinds] if isinstance(kinds, str) else kinds
    if names and not any(_is(value, name) for name in names):
        yield f"{where} is no {' or '.join(names)}"
        return
    if "const" in schema and not _same(value, schema["const"]):
        yield f"{where} is not {json.dumps(schema['const'], ensure_ascii=False)}"
    if "enum" in schema and not any(_same(value, one) for one in schema["enum"]):
        yield f"{where} is none of {json.dumps(schema['enum'], ensure_ascii=False)}"
    if isinstance(value, dict):
        yield from _of_object(value, schema, where)
    elif isinstance(value, list):
        yield from _of_length(value, schema, "Items", where)
        for i, one in enumerate(value):
            yield from differences(one, schema.get("items", {}), f"{where}[{i}]")
    elif isinstance(value, str):
        yield from _of_length(value, schema, "Length", where)
        if not re.search(schema.get("pattern", ""), value):
            yield f"{where} does not match {schema['pattern']}"
    elif _is(value, "number") and not _in_range(value, schema):
        yield f"{where} is out of range"


def _in_range(value: float, schema: Mapping[str, Any]) -> bool:
    return bool(schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf))


def _of_object(value: dict[str, Any], schema: Mapping[str, Any], where: str) -> Iterator[str]:
    known = schema.get("properties", {})
    for name in schema.get("required", []):
        if name not in value:
            yield f"{where}.{name} is missing"
    more = schema.get("additionalProperties", True)
    for name, one in value.items():
        if name in known:
            yield from differences(one, known[name], f"{where}.{name}")
        elif more is False:
            yield f"{where}.{name} was not asked for"
        elif isinstance(more, dict):
            yield from differences(one, more, f"{where}.{name}")


def _of_length(value: Any, schema: Mapping[str, Any], of: str, where: str) -> Iterator[str]:
    if not schema.get(f"min{of}", 0) <= len(value) <= schema.get(f"max{of}", math.inf):
        yield f"{where} has length {len(value)}"


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[kind])


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    return bool(a == b)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is none")
