"""What POST /v1/messages takes, and what it means as a chat request.

Owns the fields of the body, content blocks and the forms of tools. What cannot be done is refused by its
name, but for the tools that Anthropic's own servers run: agents send them unasked, so they are left out, with
a line in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, Field, StrictBool

from lmdeploy.errors import InvalidValueError, MissingFieldError, RequestError, shorten
from lmdeploy.serve.openai.protocol import ChatBody, Count, GenerationBody, Stops
from lmdeploy.serve.translated import chat_body, refuse, shared_fields

logger = logging.getLogger("lmdeploy.serve")

_INSTEAD = {
    "stop": "use 'stop_sequences'",
    "response_format": "use 'output_config.format'",
    "n": "a message is one answer",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class Thinking(BaseModel):
    type: str
    budget_tokens: Count | None = None


class OutputConfig(BaseModel):
    effort: str | None = None
    format: dict[str, Any] | None = None


class ToolChoice(BaseModel):
    type: str
    name: str | None = None
    disable_parallel_tool_use: StrictBool | None = None


class CountBody(GenerationBody):
    """POST /v1/messages/count_tokens; what one sends to /v1/messages is accepted too."""

    messages: Any
    system: Any = None
    stop_sequences: Stops | None = None
    tools: list[Any] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None  # as it was spelled before `output_config`
    mcp_servers: list[Any] | None = Field(None, max_length=0)
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        """What cannot be done. Raises RequestError."""
        refuse(self, _INSTEAD)
        if self.thinking and self.thinking.type not in ("enabled", "disabled", "adaptive"):
            raise _wrong("thinking.type", "must be 'enabled', 'disabled' or 'adaptive'", self.thinking.type)
        if self.tool_choice and self.tool_choice.type not in (*_CHOICES, "tool"):
            raise _wrong("tool_choice.type", "must be 'auto', 'any', 'tool' or 'none'", self.tool_choice.type)


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: Count


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as the chat route takes it; `places` tells where the client wrote its parts."""

    body: ChatBody
    places: dict[str, str]


def asked(body: CountBody) -> Asked:
    """The same request for the chat route. Raises RequestError."""
    conversation = _Conversation()
    messages = conversation.read(body.system, body.messages)
    places = conversation.places
    fields = {
        **shared_fields(body, but=("stream_options", *_INSTEAD)),
        "messages": messages,
        "stop": body.stop_sequences,
        "tools": _tools(body.tools or [], places) or None,
        "tool_choice": _tool_choice(body.tool_choice),
        "response_format": _response_format(body),
        "chat_template_kwargs": _template_kwargs(body),
    }
    if body.tool_choice and body.tool_choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    if messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    places |= {
        "stop": "stop_sequences",
        "response_format.json_schema": "output_config.format",
        "response_format": "output_config.format",
        "tool_choice.function": "tool_choice",
    }
    given = {name: value for name, value in fields.items() if value is not None}
    return Asked(chat_body(given, places), places)


def _wrong(path: str, problem: str, value: Any) -> InvalidValueError:
    return InvalidValueError(f"Invalid value for '{path}': {problem}, got {shorten(value)}.", param=path)


def _text_of(block: Mapping[str, Any], name: str, path: str) -> str:
    value = block.get(name)
    if value is None:
        raise MissingFieldError(f"Missing required parameter: '{path}.{name}'.", param=f"{path}.{name}")
    if not isinstance(value, str):
        raise _wrong(f"{path}.{name}", "must be a string", value)
    return value


@dataclass(slots=True)
class _Conversation:
    """Chat messages of a conversation in blocks: the results of tools become messages of their own."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)

    def read(self, system: Any, messages: Any) -> list[dict[str, Any]]:
        if system not in (None, "", []):
            self._add({"role": "system", "content": _content(system, "system")}, "system")
        if not isinstance(messages, list):
            raise _wrong("messages", "must be a list of messages", messages)
        if not messages:
            raise InvalidValueError("'messages' must hold at least one message.", param="messages")
        for number, message in enumerate(messages):
            self._message(message, f"messages[{number}]")
        return self.messages

    def _add(self, message: dict[str, Any], path: str) -> None:
        self.places[f"messages[{len(self.messages)}]"] = path
        self.messages.append(message)

    def _message(self, message: Any, path: str) -> None:
        if not isinstance(message, Mapping):
            raise _wrong(path, "must be an object", message)
        role, content = _text_of(message, "role", path), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise _wrong(f"{path}.role", "must be 'user' or 'assistant'", role)
        blocks = _blocks(content, f"{path}.content")
        if role == "assistant":
            self._add(_assistant(blocks, f"{path}.content"), path)
        else:
            self._from_user(role, blocks, path)

    def _from_user(self, role: str, blocks: list[Any], path: str) -> None:
        parts = []
        for number, block in enumerate(blocks):
            where = f"{path}.content[{number}]"
            if isinstance(block, Mapping) and block.get("type") == "tool_result":
                content = block.get("content")
                result = "" if content is None else _content(content, f"{where}.content")
                name = _text_of(block, "tool_use_id", where)
                self._add({"role": "tool", "tool_call_id": name, "content": result}, where)
            else:
                parts.append(_part(block, where))
        if parts or not blocks:
            self._add({"role": role, "content": parts}, path)


def _assistant(blocks: list[Any], path: str) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts = []
    for number, block in enumerate(blocks):
        where = f"{path}[{number}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_use":
            function = {"name": _text_of(block, "name", where), "arguments": block.get("input")}
            calls.append({"id": _text_of(block, "id", where), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(_text_of(block, "thinking", where))
        elif kind != "redacted_thinking":
            parts.append(_part(block, where))
    message: dict[str, Any] = {"role": "assistant", "content": parts or None if calls else parts}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


def _blocks(content: Any, path: str) -> list[Any]:
    if content is None:
        raise MissingFieldError(f"Missing required parameter: '{path}'.", param=path)
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise _wrong(path, "must be a string or a list of blocks", content)
    return content


def _content(content: Any, path: str) -> list[dict[str, Any]]:
    return [_part(block, f"{path}[{number}]") for number, block in enumerate(_blocks(content, path))]


def _part(block: Any, path: str) -> dict[str, Any]:
    """A block as a part of the chat route's contents."""
    if not isinstance(block, Mapping):
        raise _wrong(path, "must be an object", block)
    kind = block.get("type")
    if kind == "text":
        return {"type": "text", "text": _text_of(block, "text", path)}
    source = block.get("source")
    form = source.get("type") if isinstance(source, Mapping) else None
    if kind == "image" and isinstance(source, Mapping) and form in ("base64", "url"):
        url = (
            source.get("url")
            if form == "url"
            else f"data:{source.get('media_type')};base64,{source.get('data')}"
        )
        return {"type": "image_url", "image_url": {"url": url}}
    if kind == "document" and isinstance(source, Mapping) and form == "text":
        return {"type": "text", "text": _text_of(source, "data", f"{path}.source")}
    raise RequestError(f"'{path}' is of type {shorten(kind)}, which is not supported here.", param=path)


def _tools(given: list[Any], places: dict[str, str]) -> list[dict[str, Any]]:
    tools: list[dict[str, Any]] = []
    for number, tool in enumerate(given):
        where = f"tools[{number}]"
        if not isinstance(tool, Mapping):
            raise _wrong(where, "must be an object", tool)
        if tool.get("type") not in (None, "custom"):
            logger.info("a tool of type %.80r is left out", tool.get("type"))
            continue
        chats = f"tools[{len(tools)}]"
        places |= {
            chats: where,
            f"{chats}.function": where,
            f"{chats}.function.parameters": f"{where}.input_schema",
        }
        names = {
            "name": "name",
            "description": "description",
            "input_schema": "parameters",
            "strict": "strict",
        }
        function = {chat: tool[own] for own, chat in names.items() if tool.get(own) is not None}
        tools.append({"type": "function", "function": function})
    return tools


def _tool_choice(choice: ToolChoice | None) -> Any:
    if choice is None:
        return None
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return _CHOICES[choice.type]


def _response_format(body: CountBody) -> dict[str, Any] | None:
    given = (body.output_config.format if body.output_config else None) or body.output_format
    if given is None:
        return None
    if given.get("type") != "json_schema":
        raise _wrong("output_config.format.type", "must be 'json_schema'", given.get("type"))
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": given.get("schema")}}


def _template_kwargs(body: CountBody) -> dict[str, Any] | None:
    """Thinking is for the model's template to turn on and off; silence leaves it to the model."""
    given = dict(body.chat_template_kwargs or {})
    if body.thinking is not None and body.thinking.type != "adaptive":
        given.setdefault("enable_thinking", body.thinking.type == "enabled")
    return given or None
