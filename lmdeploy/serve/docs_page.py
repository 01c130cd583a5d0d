"""GET /docs: what /openapi.json says, as one page without scripts, so that nothing comes from other hosts."""

from __future__ import annotations

from html import escape
from typing import Any

_STYLE = (
    "body{font:15px system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}td,th{border:1px solid #8888;padding:.2rem .5rem}"
    "td,th{text-align:left;vertical-align:top}"
    "code{font-family:ui-monospace,monospace}:root{color-scheme:light dark}"
)


def docs_page(document: dict[str, Any]) -> str:
    """HTML for an OpenAPI document with its schemas written out."""
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    operations = [
        _operation(method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f'<h1>{title}</h1><p>Machines read <a href="openapi.json">openapi.json</a>.</p>{"".join(operations)}'
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    said = f"<p>{escape(operation['description'])}</p>" if operation.get("description") else ""
    content = operation.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    required = schema.get("required", ())
    rows = [_row(name, field, name in required) for name, field in schema.get("properties", {}).items()]
    table = f"<table><tr><th>field<th>values{''.join(rows)}</table>" if rows else ""
    return f"<h2><code>{method} {escape(path)}</code></h2>{said}{table}"


def _row(name: str, field: dict[str, Any], required: bool) -> str:
    mark = " (required)" if required else ""
    return f"<tr><td><code>{escape(name)}</code>{mark}<td>{escape(_kind(field))}"


def _kind(field: dict[str, Any]) -> str:
    """The values a schema allows, in a few words."""
    if "anyOf" in field:
        return " or ".join(_kind(one) for one in field["anyOf"] if one.get("type") != "null")
    if "enum" in field:
        return ", ".join(map(str, field["enum"]))
    kind = str(field.get("type", "any"))
    if kind == "array":
        kind = f"array of {_kind(field.get('items', {}))}"
    low = field.get("minimum", field.get("exclusiveMinimum"))
    high = field.get("maximum", field.get("exclusiveMaximum"))
    bounds = [f"from {low:.20g}"] if low is not None else []
    bounds += [f"to {high:.20g}"] if high is not None else []
    return " ".join([kind, *bounds])
