"""Tools and earlier calls for chat templates that know nothing of them, or want them in a special way.

What a template cannot say is said in words, and calls are written as text. Knows one format of calls, the
most common one, and no template.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_TOOLS = re.compile(r"\btools\b")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


def shows_tools(templates: Mapping[str, str]) -> bool:
    """Whether one of a model's templates makes use of a request's tools."""
    return any(_TOOLS.search(text) for text in templates.values())


def shows_calls(templates: Mapping[str, str]) -> bool:
    """Whether one of a model's templates writes the calls of earlier answers."""
    return any("tool_calls" in text for text in templates.values())


def with_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The messages with the tools described in the system message, or in one in front."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    words = (
        f"You can call these functions, each described as JSON:\n{listed}\n"
        "To call one, answer with a JSON object of its name and arguments, inside of tags:\n"
        '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
    )
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{words}"}
        return [first, *map(dict, messages[1:])]
    return [{"role": "system", "content": words}, *map(dict, messages)]


def with_calls_as_text(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with calls in the text of the assistant, and results in the text of the user."""
    return [_as_text(message) for message in messages]


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] in ("tool", "function"):
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    texts = [_call(call["function"]) for call in calls]
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": "\n".join(filter(None, [message["content"], *texts]))}


def _call(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def wants_short_ids(templates: Mapping[str, str]) -> bool:
    """Whether one of a model's templates refuses ids of calls that have not nine characters."""
    return any("length 9" in text for text in templates.values())


def with_short_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with ids of nine characters, equal ones for equal ids."""
    out = []
    for message in messages:
        changed = dict(message)
        if "tool_call_id" in message:
            changed["tool_call_id"] = _short(message["tool_call_id"])
        if "tool_calls" in message:
            changed["tool_calls"] = [
                {**call, "id": _short(call.get("id", ""))} for call in message["tool_calls"]
            ]
        out.append(changed)
    return out


def _short(call_id: Any) -> str:
    text = str(call_id)
    return text if _SHORT_ID.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()[:9]
