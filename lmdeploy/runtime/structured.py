"""What callers ask the shape of an answer to be -> the `Grammar` of an engine request, checked.

Owns the spellings of response formats, the options of JSON (where blanks may stand), and the check that a
grammar can be compiled within limits. Knows no wire format and no engine; which keywords of a schema are
enforced is the business of `schema_check`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from lmdeploy.engine.request import Grammar
from lmdeploy.errors import InvalidValueError, MissingFieldError, RequestError, check_text, shorten
from lmdeploy.runtime.schema_check import check_schema
from lmdeploy.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # importing it takes time that only users of grammars should wait
    import llguidance

MAX_GRAMMAR = 1 << 20  # characters of a grammar's text
# Blanks where JSON allows them: one, or a new line and its indentation. In more small models lose themselves.
_JSON_OPTIONS: Any = {"whitespace_pattern": r"(\x20|\n[\x20\t]{0,40})", "lenient": False}
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def json_schema_grammar(
    schema: Mapping[str, Any], *, strict: bool = False, param: str = "response_format.json_schema.schema"
) -> Grammar:
    """JSON that `schema` allows, properties in the order of the schema.

    Every keyword that restricts is enforced, or refused by name and path. `strict` also refuses names that
    JSON Schema does not know. Raises RequestError.
    """
    if not isinstance(schema, Mapping):
        raise InvalidValueError(
            f"Invalid value for '{param}': must be a JSON Schema, which is an object, got {shorten(schema)}.",
            param=param,
        )
    check_schema(schema, param, strict=strict)
    return _grammar("json_schema", json.dumps(schema, ensure_ascii=False), param)


def json_object_grammar() -> Grammar:
    """Any JSON object."""
    return Grammar("json_schema", '{"type": "object"}')


def regex_grammar(pattern: str, *, param: str = "response_format.regex_schema") -> Grammar:
    """Texts that `pattern` matches as a whole. Raises RequestError."""
    return _grammar("regex", _text(pattern, param), param)


def lark_grammar(text: str, *, param: str = "response_format.grammar") -> Grammar:
    """Texts of a grammar in Lark's notation, or in GBNF ("root ::= ..."). Raises RequestError."""
    text = _text(text, param)
    if "::=" in text:
        from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

        try:
            text = any_to_lark(text)
        except (GbnfToLarkError, ValueError, LookupError, AssertionError, RecursionError) as error:
            raise _unusable(param, str(error)) from None
    return _grammar("lark", text, param)


def choice_grammar(choices: Any, *, param: str = "guided_choice") -> Grammar:
    """One of these texts. Raises RequestError."""
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise InvalidValueError(
            f"Invalid value for '{param}': must be a list of texts that are not empty.", param=param
        )
    for i, text in enumerate(choices):
        check_text(text, f"{param}[{i}]")
    texts = "|".join(json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(choices))
    return _grammar("lark", f"start: {texts}", param)


def response_grammar(value: Any, *, param: str = "response_format") -> Grammar | None:
    """The grammar of a `response_format`, None for free text. Raises RequestError.

    Types: text, json_object (with `schema`, too), json_schema, regex_schema, grammar.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidValueError(
            f"Invalid value for '{param}': must be an object, got {shorten(value)}.", param=param
        )
    given = {name: item for name, item in value.items() if item is not None}
    kind = given.pop("type", None)
    if kind is None:
        raise MissingFieldError(f"Missing required parameter: '{param}.type'.", param=f"{param}.type")
    fields = _FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        raise InvalidValueError(
            f"Invalid value for '{param}.type': must be one of {', '.join(_FIELDS)}, got {shorten(kind)}.",
            param=f"{param}.type",
        )
    for name in given:
        if name not in fields:
            raise InvalidValueError(
                f"'{param}.{name:.80}' is not a field of the response format {kind!r}.",
                param=f"{param}.{name:.80}",
            )
    return _response_grammar(kind, given, param)


_FIELDS: dict[str, tuple[str, ...]] = {
    "text": (),
    "json_object": ("schema",),
    "json_schema": ("json_schema",),
    "regex_schema": ("regex_schema",),
    "grammar": ("grammar",),
}


def _response_grammar(kind: str, given: Mapping[str, Any], param: str) -> Grammar | None:
    if kind == "text":
        return None
    if kind == "json_object":
        schema = given.get("schema")
        return json_schema_grammar(schema, param=f"{param}.schema") if schema else json_object_grammar()
    if kind not in given:
        raise MissingFieldError(f"Missing required parameter: '{param}.{kind}'.", param=f"{param}.{kind}")
    if kind == "json_schema":
        return _named_schema(given[kind], f"{param}.{kind}")
    make = regex_grammar if kind == "regex_schema" else lark_grammar
    return make(given[kind], param=f"{param}.{kind}")


def _named_schema(value: Any, param: str) -> Grammar:
    """OpenAI's wrapper: name, schema, strict, description."""
    if not isinstance(value, Mapping):
        raise InvalidValueError(
            f"Invalid value for '{param}': must be an object, got {shorten(value)}.", param=param
        )
    name, strict = value.get("name"), value.get("strict")
    if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise InvalidValueError(
            f"Invalid value for '{param}.name': must be 1 to 64 letters, digits, '_' or '-', "
            f"got {shorten(name)}.",
            param=f"{param}.name",
        )
    if strict is not None and not isinstance(strict, bool):
        raise InvalidValueError(
            f"Invalid value for '{param}.strict': must be true or false, got {shorten(strict)}.",
            param=f"{param}.strict",
        )
    schema = value.get("schema")
    if schema is None:
        raise MissingFieldError(f"Missing required parameter: '{param}.schema'.", param=f"{param}.schema")
    return json_schema_grammar(schema, strict=bool(strict), param=f"{param}.schema")


def check_grammar(grammar: Grammar, tokenizer: Tokenizer, *, param: str = "response_format") -> None:
    """Raise RequestError when no engine of this vocabulary could follow `grammar`."""
    del tokenizer  # grammars of this version name no tokens
    problem = _problem(grammar)
    if problem is not None:
        raise _unusable(param, problem)


def _grammar(kind: Any, text: str, param: str) -> Grammar:
    if len(text) > MAX_GRAMMAR:
        raise InvalidValueError(
            f"'{param}' has {len(text)} characters; the most is {MAX_GRAMMAR}.", param=param
        )
    check_text(text, param)
    grammar = Grammar(kind, text)
    problem = _problem(grammar)
    if problem is not None:
        raise _unusable(param, problem)
    return grammar


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidValueError(
            f"Invalid value for '{param}': must be a text that is not empty, got {shorten(value)}.",
            param=param,
        )
    return value


def _unusable(param: str, problem: str) -> RequestError:
    line = " ".join(problem.split())
    return InvalidValueError(f"'{param}' cannot be enforced: {line[:400]}", param=param)


def lark_expression(grammar: Grammar) -> str | None:
    """The grammar as part of a rule of a Lark grammar; None where it is a whole one itself."""
    if grammar.kind == "json_schema":
        schema = json.loads(grammar.text)
        return f"%json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS}, ensure_ascii=False)}"
    if grammar.kind == "regex":
        escaped = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", grammar.text)
        return f"/{escaped}/"
    return None


def compiled_form(grammar: Grammar) -> str:
    """The grammar as llguidance takes it. Raises ValueError when its text is not even that."""
    import llguidance

    if grammar.kind == "json_schema":
        return llguidance.LLMatcher.grammar_from_json_schema(grammar.text, overrides=_JSON_OPTIONS)
    if grammar.kind == "regex":  # classes as in ECMAScript: \d is 0 to 9
        pattern = llguidance.regex_to_lark(grammar.text, "dw")
        return llguidance.LLMatcher.grammar_from_lark(f"start: /{pattern}/")
    return llguidance.LLMatcher.grammar_from_lark(grammar.text)


def limits() -> llguidance.LLParserLimits:
    """What bounds time and memory of compiling a grammar and of each step in it."""
    import llguidance

    return llguidance.LLParserLimits(verbose_errors=False)


@lru_cache(maxsize=256)
def _problem(grammar: Grammar) -> str | None:
    """Why the grammar cannot be compiled, or None. Takes up to about a second; other threads run on."""
    import llguidance

    try:
        form = compiled_form(grammar)
    except ValueError as error:
        return str(error)
    return llguidance.LLMatcher.validate_grammar(form, limits=limits()) or None
