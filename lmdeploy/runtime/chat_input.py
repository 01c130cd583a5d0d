"""Chat messages and template arguments of a caller, checked and in the form chat templates expect.

Owns the checks of roles, contents and texts and their `param` paths, for server and Python callers alike.
Knows no template and no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from lmdeploy.errors import InvalidValueError, MissingFieldError, RequestError, check_text, shorten

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_MEDIA = {
    "image_url": "images",
    "image": "images",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "videos",
    "file": "files",
}
_DEEPEST = 128
_TEMPLATE_TYPES = {"add_generation_prompt": bool, "continue_final_message": bool, "tools": list}


def normalise_messages(raw: Any) -> list[dict[str, Any]]:
    """Checked copies of the messages: plain text contents, parsed tool arguments, no nulls.

    Raises RequestError whose `param` is the path of the fault, such as `messages[2].content[0]`.
    """
    if not isinstance(raw, list):
        raise InvalidValueError(
            f"Invalid value for 'messages': must be a list of messages, got {shorten(raw)}.", param="messages"
        )
    if not raw:
        raise InvalidValueError("'messages' must hold at least one message.", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(raw)]


def _message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidValueError(
            f"Invalid value for '{path}': must be an object, got {shorten(message)}.", param=path
        )
    role = message.get("role")
    if role is None:
        raise MissingFieldError(f"Missing required parameter: '{path}.role'.", param=f"{path}.role")
    if role not in _ROLES:
        raise InvalidValueError(
            f"Invalid value for '{path}.role': must be one of {', '.join(_ROLES)}, got {shorten(role)}.",
            param=f"{path}.role",
        )
    out = {key: value for key, value in message.items() if value is not None}
    calls = _tool_calls(out.get("tool_calls"), f"{path}.tool_calls")
    out.pop("tool_calls", None)
    out["role"] = "system" if role == "developer" else role
    out["content"] = _content(message.get("content"), f"{path}.content", optional=bool(calls))
    if calls:
        out["tool_calls"] = calls
    check_texts(out, path)
    return out


def check_template_kwargs(given: Any, refused: Collection[str] = ("messages",)) -> dict[str, Any]:
    """A copy of the variables a caller gives the chat template. Raises RequestError naming the variable.

    refused: variables that are set in another way.
    """
    name = "chat_template_kwargs"
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise InvalidValueError(
            f"Invalid value for '{name}': must map names to values, got {shorten(given)}.", param=name
        )
    for key, value in given.items():
        if key in refused:
            raise InvalidValueError(f"'{name}' may not hold {key!r}.", param=f"{name}.{key}")
        kind = _TEMPLATE_TYPES.get(key, object)
        if value is not None and not isinstance(value, kind):
            raise InvalidValueError(
                f"Invalid value for '{name}.{key}': must be of type {kind.__name__}, got {shorten(value)}.",
                param=f"{name}.{key}",
            )
    check_texts(given, name)
    return dict(given)


def check_texts(value: Any, path: str, depth: int = 0) -> None:
    """Every text within, keys too, can be written as UTF-8; what is nested without end is refused."""
    if depth > _DEEPEST:
        raise InvalidValueError(
            f"Invalid value for '{path[:80]}...': nested more than {_DEEPEST} deep.", param=path[:80]
        )
    if isinstance(value, str):
        check_text(value, path)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(key, str):
                check_text(key, f"a name in {path}")
            check_texts(item, f"{path}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_texts(item, f"{path}[{index}]", depth + 1)


def _content(content: Any, path: str, optional: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        if optional:
            return ""
        raise MissingFieldError(f"Missing required parameter: '{path}'.", param=path)
    if not isinstance(content, list):
        raise InvalidValueError(
            f"Invalid value for '{path}': must be a string or a list of parts, got {shorten(content)}.",
            param=path,
        )
    return "\n".join(_part(part, f"{path}[{i}]") for i, part in enumerate(content))


def _part(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _MEDIA:
        raise RequestError(
            f"'{path}' is of type '{kind}': this model does not take {_MEDIA[kind]}.", param=path
        )
    if kind not in ("text", "refusal"):
        raise InvalidValueError(
            f"Invalid value for '{path}.type': must be 'text', got {shorten(kind)}.", param=f"{path}.type"
        )
    text = part.get(kind)
    if not isinstance(text, str):
        raise InvalidValueError(
            f"Invalid value for '{path}.{kind}': must be a string, got {shorten(text)}.",
            param=f"{path}.{kind}",
        )
    return text


def _tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise InvalidValueError(f"Invalid value for '{path}': must be a list.", param=path)
    return [_tool_call(call, f"{path}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidValueError(
            f"Invalid value for '{path}': must be an object with 'function.name'.", param=path
        )
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(arguments: Any) -> Any:
    """Templates take an object; what a model once wrote and is no JSON stays as it was."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments
