"""What /openapi.json says of a route beyond its path: bodies, parameters, kinds of answers, errors."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

_TEXT = {"type": "string"}
_ERROR = {
    "type": "object",
    "required": ["message", "type", "param", "code"],
    "properties": {
        "message": _TEXT,
        "type": _TEXT,
        "param": {"type": ["string", "null"]},
        "code": {"type": ["string", "null"]},
    },
}
# Anthropic's errors have another form inside and more around it.
_ERRORS: dict[bool, dict[str, Any]] = {
    False: {"type": "object", "required": ["error"], "properties": {"error": _ERROR}},
    True: {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {"type": "object", "required": ["type", "message"]},
        },
    },
}


def responses(path: str, *, streams: bool = False, text: bool = False) -> dict[int | str, dict[str, Any]]:
    """The answers of a route, as FastAPI's `responses`. text: it answers plain text; streams: events, too."""
    kinds = {"text/plain": {"schema": _TEXT}} if text else {"application/json": {"schema": {}}}
    if streams:
        kinds["text/event-stream"] = {"schema": _TEXT}
    error = {"application/json": {"schema": _ERRORS[path.startswith("/v1/messages")]}}
    return {
        200: {"description": "The answer", "content": kinds},
        "default": {"description": "What is wrong", "content": error},
    }


def parameters(path: str, query: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Those in the path, which may hold slashes, and optional ones behind it."""
    inside = [part.partition(":")[0] for part in path.replace("}", "{").split("{")[1::2]]
    found = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in inside]
    return found + [{"name": name, "in": "query", "required": False, "schema": _TEXT} for name in query]


def request_body(body: type[BaseModel]) -> dict[str, Any]:
    """The JSON body, with its definitions written out where they are used."""
    schema = body.model_json_schema()
    definitions = schema.pop("$defs", {})

    def resolved(value: Any) -> Any:
        if isinstance(value, dict) and "$ref" in value:
            return resolved(definitions[value["$ref"].rpartition("/")[2]])
        if isinstance(value, dict):
            return {key: resolved(item) for key, item in value.items()}
        return [resolved(item) for item in value] if isinstance(value, list) else value

    return {"required": True, "content": {"application/json": {"schema": resolved(schema)}}}
