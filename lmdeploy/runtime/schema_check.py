"""Which keywords of a JSON Schema are enforced, and where one stands that is not.

Walks a schema the way a validator would, references followed. Knows what llguidance enforces; whether a whole
schema can be compiled is found out by compiling it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from lmdeploy.errors import InvalidValueError, RequestError, shorten

DEEPEST = 100  # schemas within schemas
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SINGLES = ("additionalProperties", "items", "additionalItems")
# Each is a rule that llguidance enforces.
_ENFORCED = frozenset(
    [
        "type",
        "enum",
        "const",
        "$ref",
        "anyOf",
        "oneOf",
        "allOf",
        "$defs",
        "definitions",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "items",
        "prefixItems",
        "additionalItems",
        "minItems",
        "maxItems",
        "properties",
        "patternProperties",
        "additionalProperties",
        "required",
        "minProperties",
        "maxProperties",
    ]
)
# Of no consequence for what is valid.
_NOTES = frozenset(
    [
        "$schema",
        "$id",
        "id",
        "$anchor",
        "$comment",
        "$vocabulary",
        "title",
        "description",
        "default",
        "example",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "discriminator",
        "externalDocs",
        "xml",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
    ]
)
# Rules that JSON Schema or OpenAPI know and that nothing here enforces.
_REFUSED = frozenset(
    [
        "not",
        "if",
        "then",
        "else",
        "contains",
        "minContains",
        "maxContains",
        "uniqueItems",
        "propertyNames",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "unevaluatedItems",
        "unevaluatedProperties",
        "$dynamicRef",
        "$dynamicAnchor",
        "$recursiveRef",
        "$recursiveAnchor",
        "nullable",
        "x-guidance",
    ]
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "nullable": (False,),
    "unevaluatedProperties": (True,),
    "unevaluatedItems": (True,),
    "minContains": (0,),
}

Place = tuple[str, Mapping[str, Any]]


def check_schema(schema: Mapping[str, Any], path: str, *, strict: bool) -> None:
    """Raise RequestError for the first keyword that would be dropped; `param` is where it stands.

    `strict` also refuses names that are no keywords at all, which otherwise restrict nothing.
    """
    for place, part in places(schema, path):
        for name, value in part.items():
            if name in _ENFORCED or name in _NOTES or is_neutral(name, value):
                continue
            if name in _REFUSED or (strict and not name.startswith("x-")):
                raise RequestError(
                    f"'{place}.{name}': the JSON Schema keyword '{name}' is not supported, so it could not "
                    "be enforced; leave it out.",
                    param=f"{place}.{name}",
                )


def is_neutral(name: str, value: Any) -> bool:
    """Whether the keyword asks for nothing with this value."""
    return any(value is n for n in _NEUTRAL.get(name, ()))


def loosened(schema: Any, dropped: Callable[[str], None], path: str) -> Any:
    """The schema without the keywords that cannot be enforced; `dropped` hears where each stood."""
    if isinstance(schema, list):
        return [loosened(part, dropped, f"{path}[{i}]") for i, part in enumerate(schema)]
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Any] = {}
    for name, value in schema.items():
        below = f"{path}.{name}"
        if name in _REFUSED:
            if not is_neutral(name, value):
                dropped(below)
        elif name in _MAPS and isinstance(value, Mapping):
            kept[name] = {key: loosened(part, dropped, f"{below}.{key}") for key, part in value.items()}
        elif name in _LISTS or name in _SINGLES:
            kept[name] = loosened(value, dropped, below)
        else:
            kept[name] = value
    return kept


def places(schema: Mapping[str, Any], path: str) -> Iterator[Place]:
    """Every schema in `schema` that is an object, with its path, itself first; each once."""
    seen: set[int] = set()
    stack: list[tuple[str, Any, int]] = [(path, schema, 0)]
    while stack:
        place, part, depth = stack.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        if depth > DEEPEST:
            raise InvalidValueError(f"'{path}': schemas are nested deeper than {DEEPEST} levels.", param=path)
        seen.add(id(part))
        yield place, part
        below = [(f"{place}.{name}", inner, depth + 1) for name, inner in _below(part)]
        target = referred(schema, part.get("$ref"), place)
        if isinstance(target, Mapping):
            below.append((f"{path}{_dotted(part['$ref'])}", target, depth + 1))
        stack.extend(reversed(below))


def _below(part: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in part.items():
        if name in _MAPS and isinstance(value, Mapping):
            yield from ((f"{name}.{key}", inner) for key, inner in value.items())
        elif (name in _LISTS or name in _SINGLES) and isinstance(value, list):
            yield from ((f"{name}[{i}]", inner) for i, inner in enumerate(value))
        elif name in _SINGLES:
            yield name, value


def referred(root: Any, reference: Any, place: str) -> Any:
    """What a reference within the schema points to; None when there is no reference.

    Raises RequestError for one that points nowhere, or out of the schema.
    """
    if reference is None:
        return None
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise RequestError(
            f"'{place}.$ref': {shorten(reference)} is not supported; a reference is '#', or '#/' and a path "
            "within the schema.",
            param=f"{place}.$ref",
        )
    target = root
    for step in _steps(reference):
        try:
            target = target[int(step)] if isinstance(target, list) else target[step]
        except (KeyError, IndexError, ValueError, TypeError):
            raise RequestError(
                f"'{place}.$ref': {shorten(reference)} points to nothing in the schema.",
                param=f"{place}.$ref",
            ) from None
    return target


def _steps(reference: str) -> list[str]:
    steps = reference.split("/")[1:]
    return [unquote(step).replace("~1", "/").replace("~0", "~") for step in steps]


def _dotted(reference: str) -> str:
    return "".join(f".{step}" for step in _steps(reference))
