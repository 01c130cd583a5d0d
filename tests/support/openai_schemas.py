"""Every answer of the in-process servers, checked against the schemas that OpenAI publishes."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs


def _with_nulls(schema: Any) -> Any:
    """`nullable`, which JSON Schema does not know, as the type it means."""
    if isinstance(schema, list):
        return [_with_nulls(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    out = {name: _with_nulls(value) for name, value in schema.items() if name != "nullable"}
    return {"anyOf": [out, {"type": "null"}]} if schema.get("nullable") is True else out


_DOCUMENT = _with_nulls(json.loads((Path(__file__).parents[1] / "data/openai_schemas.json").read_text()))
# Route -> (schema of a whole answer, schema of an event of its stream)
_SCHEMAS = {
    "/v1/chat/completions": ("CreateChatCompletionResponse", "CreateChatCompletionStreamResponse"),
    "/v1/completions": ("CreateCompletionResponse", "CreateCompletionResponse"),
    "/v1/models": ("ListModelsResponse", None),
    "/v1/responses": ("Response", "ResponseStreamEvent"),
}
_OTHER = ("/v1/messages", "/health", "/ping", "/v1/health")  # of another form, of errors too


class SchemaError(AssertionError):
    """An answer that OpenAI's schema does not allow."""


@functools.cache
def validator(name: str) -> Any:
    """What checks values against the schema of that name."""
    return jsonschema_rs.validator_for({**_DOCUMENT, "$ref": f"#/$defs/{name}"})


def check(name: str, value: Any) -> None:
    """Raises SchemaError that says where `value` is not what the schema wants."""
    for error in validator(name).iter_errors(value):
        where = "/".join(map(str, error.instance_path))
        raise SchemaError(f"{name}: {where}: {error.message}\n{json.dumps(value)[:2000]}")


async def check_response(response: httpx.Response) -> None:
    """An event hook of httpx: reads the response and checks what is in it."""
    path = response.request.url.path.rstrip("/") or "/"
    await response.aread()
    if response.request.method in ("HEAD", "OPTIONS") or path.startswith(_OTHER):
        return
    if response.status_code >= 400:
        check("ErrorResponse", response.json())
        return
    whole, event = _SCHEMAS.get(path, (None, None))
    if path.startswith("/v1/models/"):
        whole = "Model"
    if whole is None:
        return
    if response.headers["content-type"].startswith("text/event-stream"):
        for value in events(response.text):
            check("ErrorResponse" if "error" in value else str(event), _as_published(path, value))
    else:
        check(whole, _as_published(path, response.json()))


def events(text: str) -> Iterator[dict[str, Any]]:
    """The JSON of each event of a stream."""
    for line in text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def _as_published(path: str, value: dict[str, Any]) -> dict[str, Any]:
    """Without the nulls that OpenAI's own answers have and its schema of completions leaves out."""
    if path != "/v1/completions" or "error" in value:
        return value
    choices = [_choice(choice) for choice in value["choices"]]
    rest = {k: v for k, v in value.items() if k != "usage" or v is not None}  # in all chunks but the last
    return {**rest, "choices": choices}


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    """A chunk before the last has no finish_reason; with echo the prompt's first token has no value."""
    lists = choice["logprobs"] and {
        **choice["logprobs"],
        **{
            name: choice["logprobs"][name][choice["logprobs"][name][:1] == [None] :]
            for name in ("token_logprobs", "top_logprobs")
        },
    }
    return {**choice, "logprobs": lists, "finish_reason": choice["finish_reason"] or "stop"}
