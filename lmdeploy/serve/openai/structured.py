"""The spellings in which clients ask for the shape of an answer, as one grammar.

response_format is OpenAI's; guided_* and structured_outputs are those of other servers. A request has one of
them. What a grammar may hold is `runtime.structured`'s business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lmdeploy.engine.request import Grammar
from lmdeploy.errors import InvalidValueError, RequestError, shorten
from lmdeploy.runtime.structured import (
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
    response_grammar,
)

_KINDS = ("json", "regex", "choice", "grammar", "json_object")
# Names of libraries that old clients send; the grammar is the same whoever follows it.
_BACKENDS = ("auto", "guidance", "llguidance", "xgrammar", "outlines", "lm-format-enforcer")
_ASKING = ("response_format", "structured_outputs", *(f"guided_{kind}" for kind in _KINDS))
GRAMMAR_FIELDS = (*_ASKING, "guided_decoding_backend", "guided_whitespace_pattern")


def asked_grammar(fields: Mapping[str, Any]) -> Grammar | None:
    """The grammar that the fields of a body ask for. Raises RequestError."""
    _check_backend(fields.get("guided_decoding_backend"))
    if fields.get("guided_whitespace_pattern") is not None:
        raise _unsupported("guided_whitespace_pattern")
    asked = [name for name in _ASKING if _asks(fields.get(name))]
    if len(asked) > 1:
        raise InvalidValueError(f"'{asked[0]}' and '{asked[1]}' cannot both be given.", param=asked[1])
    if not asked:
        return response_grammar(fields.get("response_format"))
    name = asked[0]
    if name == "response_format":
        return response_grammar(fields[name])
    if name == "structured_outputs":
        return _structured_outputs(fields[name])
    return _grammar(name.removeprefix("guided_"), fields[name], name)


def _asks(value: Any) -> bool:
    if isinstance(value, Mapping) and value.get("type") == "text" and len(value) == 1:
        return False  # free text
    return value is not None and value is not False


def _structured_outputs(value: Mapping[str, Any]) -> Grammar | None:
    asked = [name for name in value if _asks(value[name])]
    for name in asked:
        if name not in _KINDS:
            raise _unsupported(f"structured_outputs.{name:.80}")
    if len(asked) > 1:
        raise InvalidValueError(
            f"'structured_outputs' can hold one of {', '.join(_KINDS)}, not {asked[0]} and {asked[1]}.",
            param="structured_outputs",
        )
    return _grammar(asked[0], value[asked[0]], f"structured_outputs.{asked[0]}") if asked else None


def _grammar(kind: str, value: Any, param: str) -> Grammar:
    if kind == "json":
        return json_schema_grammar(_schema(value, param), param=param)
    if kind == "json_object":
        if value is not True:
            raise InvalidValueError(
                f"Invalid value for '{param}': must be true or false, got {shorten(value)}.", param=param
            )
        return json_object_grammar()
    make = {"regex": regex_grammar, "choice": choice_grammar, "grammar": lark_grammar}[kind]
    return make(value, param=param)


def _schema(value: Any, param: str) -> Any:
    """Schemas come as objects, and as JSON texts of objects."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise InvalidValueError(f"'{param}' is a text, but no JSON.", param=param) from None


def _check_backend(name: str | None) -> None:
    if name is not None and name.split(":")[0] not in _BACKENDS:
        raise InvalidValueError(
            f"Invalid value for 'guided_decoding_backend': must be one of {', '.join(_BACKENDS)} (all "
            f"mean the same here), got {shorten(name)}.",
            param="guided_decoding_backend",
        )


def _unsupported(param: str) -> RequestError:
    return RequestError(f"'{param}' is not supported by this server.", param=param)
