"""Structured output through HTTP: what comes back is valid, or a 400 names what could not be enforced."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import jsonschema_rs
import pytest
from serve_fakes import Api, api

NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/n"}},
    "required": ["v"],
    "additionalProperties": False,
}


@pytest.fixture
async def server() -> AsyncIterator[Api]:
    async with api("") as made:
        yield made


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "out", "schema": schema, **more}}


async def text_of(server: Api, **fields: Any) -> str:
    response = await server.chat(**{"temperature": 1, "max_tokens": 300, **fields})
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "stop", choice
    text: str = choice["message"]["content"]
    return text


async def refusal(server: Api, **fields: Any) -> tuple[str, str]:
    """(param, message) of the 400; the same on both routes."""
    responses = [await server.chat(**fields), await server.complete(**fields)]
    assert [r.status_code for r in responses] == [400, 400], responses[0].text
    errors = [r.json()["error"] for r in responses]
    assert errors[0] == errors[1]
    return errors[0]["param"], errors[0]["message"]


SHAPES: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "[a-c]{3}"}, "[a-c]{3}"),
    ({"guided_choice": ['a "b"', "wörd"]}, 'a "b"|wörd'),
    ({"guided_json": {"type": "integer", "minimum": 5, "maximum": 9}}, "[5-9]"),
    ({"guided_json": '{"enum": [1, null]}'}, "1|null"),
    ({"guided_grammar": 'start: "x" | "y"'}, "x|y"),
    ({"guided_grammar": 'root ::= "x" [0-9]'}, "x[0-9]"),
    ({"structured_outputs": {"regex": "[xy]{2}", "json": None}}, "[xy]{2}"),
    ({"structured_outputs": {"choice": ["p"]}, "guided_decoding_backend": "outlines"}, "p"),
    ({"response_format": {"type": "regex_schema", "regex_schema": "a{4}"}}, "a{4}"),
    ({"response_format": {"type": "grammar", "grammar": 'start: "q"'}}, "q"),
    ({"response_format": {"type": "json_object", "schema": {"const": {"a": 1}}}}, r'\{\s*"a"\s*:\s*1\s*\}'),
    ({"response_format": schema_format({"type": ["null", "boolean"]})}, "null|true|false"),
]


async def test_every_spelling_shapes_the_answer(server: Api) -> None:
    for fields, pattern in SHAPES:
        assert re.fullmatch(pattern, await text_of(server, **fields))
        response = await server.complete(**fields, max_tokens=100)
        assert re.fullmatch(pattern, response.json()["choices"][0]["text"])


async def test_any_object(server: Api) -> None:
    response = await server.chat(response_format={"type": "json_object"}, max_tokens=400, temperature=1, n=4)
    for choice in response.json()["choices"]:
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)
        assert choice["message"]["content"].startswith("{")


async def test_streams_say_the_same_and_keep_characters_whole() -> None:
    """K02: a character of several tokens is sent whole."""
    family = "\N{MAN}\u200d\N{WOMAN} é 漢字"
    async with api("") as server:
        wanted = {"response_format": schema_format({"enum": [family]}), "max_tokens": 100}
        whole = await text_of(server, **wanted)
        assert json.loads(whole) == family
        create: Any = server.openai.chat.completions.create
        stream = await create(
            model="byte-model", messages=[{"role": "user", "content": "hi"}], stream=True, **wanted
        )
        parts = [c.choices[0].delta.content or "" async for c in stream if c.choices]
    assert "".join(parts) == whole
    assert not any("\ufffd" in part for part in parts)


async def test_cut_by_length(server: Api) -> None:
    response = await server.chat(
        response_format=schema_format({"type": "string", "minLength": 90}), max_tokens=5
    )
    assert response.json()["choices"][0]["finish_reason"] == "length"


REFERENCES: list[Any] = [
    {**NODE, "$defs": {"n": NODE}},
    {"type": "object", "properties": {"c": {"$ref": "#"}}, "additionalProperties": False},
    {
        "type": "object",
        "properties": {"x": {"type": "boolean"}, "y": {"$ref": "#/properties/x"}},
        "required": ["x", "y"],
        "additionalProperties": False,
    },
    {"$ref": "#/definitions/q", "definitions": {"q": {"type": "null"}}},
    {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/i"}, "$defs": {"i": {"enum": ["a"]}}},
]


async def test_references(server: Api) -> None:
    """K20."""
    for schema in REFERENCES:
        fields = {"response_format": schema_format(schema), "n": 30, "temperature": 1, "max_tokens": 120}
        response = await server.chat(**fields)
        finished = [c for c in response.json()["choices"] if c["finish_reason"] == "stop"]
        assert finished
        for choice in finished:
            jsonschema_rs.validate(schema, json.loads(choice["message"]["content"]))


async def test_references_to_nothing_are_named(server: Api) -> None:
    for reference in ["#/$defs/none", "http://example.com/schema", "other.json", 5]:
        schema = {"type": "object", "properties": {"a": {"$ref": reference}}}
        param, message = await refusal(server, response_format=schema_format(schema))
        assert param == "response_format.json_schema.schema.properties.a.$ref"
        assert str(reference) in message


REFUSED: list[tuple[Any, str]] = [
    ({"properties": {"a": {"uniqueItems": True}}}, "properties.a.uniqueItems"),
    ({"not": {}}, "not"),
    ({"items": {"if": {}, "then": {}}}, "items.if"),
    ({"contains": {}}, "contains"),
    ({"propertyNames": {}}, "propertyNames"),
    ({"anyOf": [{"dependentRequired": {"a": ["b"]}}]}, "anyOf[0].dependentRequired"),
    ({"unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"$ref": "#/x/y", "x": {"y": {"nullable": True}}}, "x.y.nullable"),
    ({"$defs": {"a": {"not": {}}}, "$ref": "#/$defs/a"}, "$defs.a.not"),
]


async def test_keywords_that_would_be_dropped_are_named(server: Api) -> None:
    """K21."""
    for schema, place in REFUSED:
        param, message = await refusal(server, response_format=schema_format(schema))
        assert param == f"response_format.json_schema.schema.{place}"
        assert place.split(".")[-1] in message
        param, _ = await refusal(server, guided_json=schema)
        assert param == f"guided_json.{place}"


async def test_strict_refuses_names_that_are_no_keywords(server: Api) -> None:
    schema = {"type": "boolean", "minumum": 3}
    param, _ = await refusal(server, response_format=schema_format(schema, strict=True))
    assert param == "response_format.json_schema.schema.minumum"
    assert await text_of(server, response_format=schema_format(schema)) in ("true", "false")


async def test_schemas_that_cannot_be_followed(server: Api) -> None:
    for schema in [
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"enum": []},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"type": "string", "pattern": "^(?=a)b$"},
        {"type": "string", "format": "colour"},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"type": "whatever"},
        {"type": 5},
        {"properties": 5},
        {"required": "a"},
        {"pattern": 5, "type": "string"},
        {"minLength": -1, "type": "string"},
        {"anyOf": {}},
    ]:
        param, message = await refusal(server, response_format=schema_format(schema))
        assert param.startswith("response_format.json_schema.schema")
        assert "\n" not in message


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": 5}}, "response_format.json_schema"),
    ({"response_format": schema_format(None)}, "response_format.json_schema.schema"),
    ({"response_format": schema_format(True)}, "response_format.json_schema.schema"),
    ({"response_format": schema_format({}, strict="yes")}, "response_format.json_schema.strict"),
    ({"response_format": {"type": "json_object", "more": 1}}, "response_format.more"),
    ({"response_format": {"type": "regex_schema", "regex_schema": ""}}, "response_format.regex_schema"),
    ({"response_format": schema_format(nested(150))}, "response_format.json_schema.schema"),
    ({"guided_regex": "(?<=a)b"}, "guided_regex"),
    ({"guided_regex": "a" * (1 << 20) + "b"}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_grammar": "start: other"}, "guided_grammar"),
    ({"guided_grammar": 'root ::= ( "a" '}, "guided_grammar"),
    ({"guided_whitespace_pattern": " *", "guided_json": {}}, "guided_whitespace_pattern"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json.not"),
]


async def test_what_is_wrong_is_named(server: Api) -> None:
    for fields, param in WRONG:
        assert (await refusal(server, **fields))[0] == param


PATTERNS = [
    ("abc", "abc"),
    (r"^[\w-]+$", r"\A[A-Za-z0-9_-]+\Z"),
    (r"^\p{L}+$", r"\A[^\W\d_]+\Z"),
    ("^a", r"\Aa"),
]


async def test_patterns_mean_what_json_schema_says(server: Api) -> None:
    """K22: unanchored patterns are found anywhere."""
    for pattern, meaning in PATTERNS:
        schema = {"type": "string", "pattern": pattern, "maxLength": 12}
        response = await server.chat(
            response_format=schema_format(schema), n=20, temperature=1, max_tokens=100
        )
        finished = [c for c in response.json()["choices"] if c["finish_reason"] == "stop"]
        assert len(finished) > 5
        for choice in finished:
            value = json.loads(choice["message"]["content"])
            assert re.search(meaning, value), value
            assert len(value) <= 12


async def test_log_probabilities_are_numbers(server: Api) -> None:
    """K16 with a schema."""
    response = await server.chat(
        response_format=schema_format({"enum": [12345]}), logprobs=True, top_logprobs=20, max_tokens=20
    )
    assert "NaN" not in response.text and "Infinity" not in response.text
    for entry in response.json()["choices"][0]["logprobs"]["content"]:
        assert len(entry["top_logprobs"]) == 20
        assert all(-9999.0 <= top["logprob"] <= 0 for top in entry["top_logprobs"])


async def test_large_schemas_hold_up_nobody() -> None:
    """K23: compiled beside the steps and beside the event loop, and once."""
    words = {"enum": [f"word{i * 7919}" for i in range(5000)]}
    lines = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}}
    async with api("x" * 3000, step_seconds=0.002, session_len=4096, num_blocks=300) as server:
        create: Any = server.openai.chat.completions.create
        messages = [{"role": "user", "content": "hi"}]
        stream = await create(model="byte-model", messages=messages, stream=True, max_tokens=1500)
        gaps: list[float] = []

        async def read() -> None:
            last = time.monotonic()
            async for _ in stream:
                gaps.append(time.monotonic() - last)
                last = time.monotonic()

        async def ask() -> None:
            for schema in (words, lines):
                response = await server.chat(response_format=schema_format(schema), max_tokens=2)
                assert response.status_code == 200, response.text

        reader = asyncio.create_task(read())
        await ask()
        reader.cancel()
        await stream.close()
    assert len(gaps) > 20  # the other stream went on meanwhile
