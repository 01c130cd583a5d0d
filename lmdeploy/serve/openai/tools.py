"""`tools` and `tool_choice` of a request: checked, and what they mean for prompt, answer and its end.

Knows no format of calls.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmdeploy.errors import InvalidValueError, MissingFieldError, RequestError, shorten
from lmdeploy.runtime.chat_input import check_texts
from lmdeploy.serve.parsers.tools import ToolSet

MAX_TOOLS = 1024
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NO_PARAMETERS = {"type": "object", "properties": {}}
_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request wants of its tools.

    shown: for the chat template. callable: None when calls are not looked for. forced: the answer must be a
    call of one of these names. named: one call of a tool the client named.
    """

    shown: list[dict[str, Any]] | None = None
    callable: ToolSet | None = None
    forced: tuple[str, ...] = ()
    named: bool = False


def tool_use(tools: Any, choice: Any) -> ToolUse:
    """Raises RequestError with the path of the fault."""
    checked = _tools(tools)
    names = [tool["function"]["name"] for tool in checked]
    mode, allowed, named = _choice(choice, names)
    if not checked:
        if mode not in (None, "none", "auto") or named or allowed is not None:
            raise InvalidValueError("'tool_choice' is given without 'tools'.", param="tool_choice")
        return ToolUse()
    if mode == "none":
        return ToolUse()
    usable = [tool for tool in checked if allowed is None or tool["function"]["name"] in allowed]
    forced = tuple(tool["function"]["name"] for tool in usable) if mode == "required" else ()
    # Of several allowed tools the others are hidden; a named one is forced, and the prompt stays as it is.
    return ToolUse(checked if named else usable, ToolSet(usable), forced, named)


def _tools(tools: Any) -> list[dict[str, Any]]:
    if not tools:
        return []
    if len(tools) > MAX_TOOLS:
        raise InvalidValueError(f"'tools' must hold at most {MAX_TOOLS} entries.", param="tools")
    checked = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    seen: set[str] = set()
    for i, tool in enumerate(checked):
        name = tool["function"]["name"]
        if name in seen:
            raise InvalidValueError(
                f"'tools[{i}].function.name': there is another tool named {name!r}.",
                param=f"tools[{i}].function.name",
            )
        seen.add(name)
    return checked


def _tool(tool: Any, path: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise _wrong(path, "must be an object", tool)
    if tool.get("type", "function") != "function":
        raise RequestError(
            f"'{path}.type' can only be 'function', got {shorten(tool.get('type'))}.", param=f"{path}.type"
        )
    function = tool.get("function")
    if function is None:
        raise MissingFieldError(f"Missing required parameter: '{path}.function'.", param=f"{path}.function")
    if not isinstance(function, Mapping):
        raise _wrong(f"{path}.function", "must be an object", function)
    path += ".function"
    name = function.get("name")
    if name is None:
        raise MissingFieldError(f"Missing required parameter: '{path}.name'.", param=f"{path}.name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong(f"{path}.name", "must be 1 to 64 letters, digits, underscores, dots or dashes", name)
    _check_kind(function, path, "description", str, "a string")
    _check_kind(function, path, "parameters", Mapping, "a JSON Schema, which is an object")
    _check_kind(function, path, "strict", bool, "true or false")
    check_texts(function, path)
    clean = {key: value for key, value in function.items() if value is not None}
    return {**tool, "type": "function", "function": {"parameters": _NO_PARAMETERS, **clean}}


def _check_kind(function: Mapping[str, Any], path: str, key: str, kind: type, words: str) -> None:
    value = function.get(key)
    if value is not None and not isinstance(value, kind):
        raise _wrong(f"{path}.{key}", f"must be {words}", value)


def _wrong(path: str, problem: str, got: Any) -> InvalidValueError:
    return InvalidValueError(f"Invalid value for '{path}': {problem}, got {shorten(got)}.", param=path)


def _choice(choice: Any, names: Sequence[str]) -> tuple[str | None, set[str] | None, bool]:
    """(mode, names that may be called or None for all, whether the client named one)."""
    if choice is None or choice in _CHOICES:
        return choice, None, False
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "function":
        name = _named(choice, "tool_choice")
        return "required", {_known(name, names, "tool_choice.function.name")}, True
    if kind == "allowed_tools":
        return _allowed(choice, names)
    raise _wrong(
        "tool_choice",
        "must be 'none', 'auto', 'required', or an object of type 'function' or 'allowed_tools'",
        choice,
    )


def _named(choice: Mapping[str, Any], path: str) -> Any:
    """The name in `{type, function: {name}}`, or in the flat form of other routes."""
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, Mapping) else None
    if name is None:
        raise MissingFieldError(
            f"Missing required parameter: '{path}.function.name'.", param=f"{path}.function.name"
        )
    return name


def _known(name: Any, names: Sequence[str], path: str) -> str:
    if name not in names:
        raise InvalidValueError(f"'{path}': no tool is named {shorten(name)}.", param="tool_choice")
    return str(name)


def _allowed(choice: Mapping[str, Any], names: Sequence[str]) -> tuple[str, set[str], bool]:
    inner = choice.get("allowed_tools", choice)
    path = "tool_choice.allowed_tools"
    if not isinstance(inner, Mapping):
        raise _wrong(path, "must be an object", inner)
    mode, tools = inner.get("mode", "auto"), inner.get("tools")
    if mode not in ("auto", "required"):
        raise _wrong(f"{path}.mode", "must be 'auto' or 'required'", mode)
    if not isinstance(tools, list) or not tools or not all(isinstance(tool, Mapping) for tool in tools):
        raise _wrong(f"{path}.tools", "must be a list of tools", tools)
    found = {_known(_named(tool, f"{path}.tools[{i}]"), names, path) for i, tool in enumerate(tools)}
    return mode, found, False
