"""What POST /v1/responses takes, and what it means as a chat request.

Owns the fields of the body, the items of a conversation and the flat forms of tools and formats. What cannot
be done is refused by its name, but for tools of types other than `function`: agents send them unasked, so
they are left out, with a line in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, StrictBool

from lmdeploy.errors import InvalidValueError, MissingFieldError, RequestError, shorten
from lmdeploy.serve.openai.protocol import ChatBody, Count, GenerationBody, TopLogprobs
from lmdeploy.serve.translated import chat_body, refuse, shared_fields

logger = logging.getLogger("lmdeploy.serve")

LOGPROBS = "message.output_text.logprobs"
_NOT_KEPT = "is not supported: this server keeps no responses; send the whole conversation as 'input'"
_INSTEAD = {
    "max_tokens": "use 'max_output_tokens'",
    "response_format": "use 'text.format'",
    "n": "a response is one answer",
}
_FORMS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_SYSTEM = {"system", "developer"}


class TextOptions(BaseModel):
    format: dict[str, Any] | None = None


class ReasoningOptions(BaseModel):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None


class ResponsesBody(GenerationBody):
    """POST /v1/responses."""

    input: Any = None
    instructions: str | None = None
    max_output_tokens: Count | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: StrictBool | None = None
    top_logprobs: TopLogprobs | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: StrictBool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        """What cannot be done. Raises RequestError."""
        refuse(self, _INSTEAD)
        for name in ("previous_response_id", "conversation", "prompt"):
            if getattr(self, name) is not None:
                raise InvalidValueError(f"'{name}' {_NOT_KEPT}.", param=name)
        if self.background:
            raise InvalidValueError(f"'background' {_NOT_KEPT} and wait for the answer.", param="background")
        if self.truncation == "auto":
            raise InvalidValueError(
                "'truncation' can only be \"disabled\": a conversation is never cut.", param="truncation"
            )
        if self.input is None:
            raise MissingFieldError("Missing required parameter: 'input'.", param="input")

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)


@dataclass(slots=True)
class Asked:
    """A request as the chat route takes it; `places` tells where the client wrote its parts."""

    body: ChatBody
    tools: list[dict[str, Any]]  # as the client wrote them, without those left out
    places: dict[str, str]


def asked(body: ResponsesBody) -> Asked:
    """The same request for the chat route. Raises RequestError."""
    messages, places = _Conversation(body.instructions).read(body.input)
    tools, kept = _tools(body.tools or [], places)
    fields = {
        **shared_fields(body, but=("stream_options", *_INSTEAD)),
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "response_format": _response_format(body.text.format if body.text else None),
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "tools": tools or None,
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "chat_template_kwargs": body.chat_template_kwargs,
        "logprobs": True if body.wants_logprobs else None,
        "top_logprobs": body.top_logprobs,
    }
    places |= {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
        "tool_choice.function": "tool_choice",
    }
    given = {name: value for name, value in fields.items() if value is not None}
    return Asked(chat_body(given, places), kept, places)


def _wrong(path: str, problem: str, value: Any) -> InvalidValueError:
    return InvalidValueError(f"Invalid value for '{path}': {problem}, got {shorten(value)}.", param=path)


def _text_of(item: Mapping[str, Any], name: str, path: str) -> str:
    value = item.get(name)
    if value is None:
        raise MissingFieldError(f"Missing required parameter: '{path}.{name}'.", param=f"{path}.{name}")
    if not isinstance(value, str):
        raise _wrong(f"{path}.{name}", "must be a string", value)
    return value


@dataclass(slots=True)
class _Conversation:
    """Messages of input items: one turn of the assistant is one message, however many items it was."""

    instructions: str | None
    messages: list[dict[str, Any]] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)
    _reasoning: str = ""  # of the turn that is being read

    def read(self, given: Any) -> tuple[list[dict[str, Any]], dict[str, str]]:
        if self.instructions is not None:
            self._add({"role": "system", "content": self.instructions}, "instructions")
        if isinstance(given, str):
            self._add({"role": "user", "content": given}, "input")
        elif not isinstance(given, list):
            raise _wrong("input", "must be a string or a list of items", given)
        elif not given:
            raise InvalidValueError("'input' must hold at least one item.", param="input")
        else:
            for number, item in enumerate(given):
                self._item(item, f"input[{number}]")
        return self.messages, self.places

    def _add(self, message: dict[str, Any], path: str) -> None:
        self.places[f"messages[{len(self.messages)}]"] = path
        self.messages.append(message)
        self._reasoning = ""  # what stands before another's words belongs to nothing

    def _item(self, item: Any, path: str) -> None:
        if not isinstance(item, Mapping):
            raise _wrong(path, "must be an object", item)
        kind = item.get("type") or "message"
        if kind == "message":
            self._message(item, path)
        elif kind == "reasoning":
            self._reasoning += _thoughts(item)
        elif kind == "function_call":
            self._call(item, path)
        elif kind == "function_call_output":
            content = _content(item.get("output"), f"{path}.output")
            call = _text_of(item, "call_id", path)
            self._add({"role": "tool", "tool_call_id": call, "content": content}, path)
        else:
            raise RequestError(f"'{path}' is of type {shorten(kind)}, which is not supported.", param=path)

    def _message(self, item: Mapping[str, Any], path: str) -> None:
        content = _content(item.get("content"), f"{path}.content")
        message = {"role": item.get("role"), "content": content}
        if message["role"] == "assistant":
            message |= self._thought()
        if len(self.messages) == 1 and {message["role"], self.messages[0]["role"]} <= _SYSTEM:
            # Templates know one system text, at the start; agents send instructions and a developer's words.
            first = self.messages[0]
            first["content"] = [*_parts(first["content"]), *_parts(content)]
        else:
            self._add(message, path)

    def _call(self, item: Mapping[str, Any], path: str) -> None:
        function = {"name": _text_of(item, "name", path), "arguments": _text_of(item, "arguments", path)}
        call = {"id": _text_of(item, "call_id", path), "type": "function", "function": function}
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant":
            self._add({"role": "assistant", "content": None, **self._thought()}, path)
        self.messages[-1].setdefault("tool_calls", []).append(call)

    def _thought(self) -> dict[str, str]:
        thought, self._reasoning = self._reasoning, ""
        return {"reasoning_content": thought} if thought else {}


def _thoughts(item: Mapping[str, Any]) -> str:
    """The text of a reasoning item that has any; encrypted ones have none."""
    content = item.get("content")
    parts = content if isinstance(content, list) else []
    return "".join(p["text"] for p in parts if isinstance(p, Mapping) and isinstance(p.get("text"), str))


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _content(content: Any, path: str) -> str | list[dict[str, Any]]:
    if content is None:
        raise MissingFieldError(f"Missing required parameter: '{path}'.", param=path)
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(path, "must be a string or a list of parts", content)
    return [_part(part, f"{path}[{number}]") for number, part in enumerate(content)]


def _part(part: Any, path: str) -> dict[str, Any]:
    if not isinstance(part, Mapping):
        raise _wrong(path, "must be an object", part)
    kind = part.get("type")
    if isinstance(kind, str) and kind in _FORMS:
        form = _FORMS[kind]
        return {"type": form, form: _text_of(part, form, path)}
    if kind == "input_image":
        return {
            "type": "image_url",
            "image_url": {"url": part.get("image_url"), "detail": part.get("detail")},
        }
    if kind in ("input_audio", "input_file"):
        return {**part, "type": "file" if kind == "input_file" else kind}
    raise _wrong(f"{path}.type", "must be 'input_text', 'output_text', 'refusal' or 'input_image'", kind)


def _tools(given: list[Any], places: dict[str, str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(for the chat route, as they came): function tools."""
    tools: list[dict[str, Any]] = []
    kept: list[dict[str, Any]] = []
    for number, tool in enumerate(given):
        if not isinstance(tool, Mapping):
            raise _wrong(f"tools[{number}]", "must be an object", tool)
        if tool.get("type") != "function":
            logger.info("a tool of type %.80r is left out", tool.get("type"))
            continue
        places[f"tools[{len(tools)}].function"] = places[f"tools[{len(tools)}]"] = f"tools[{number}]"
        names = ("name", "description", "parameters", "strict")
        function = {name: tool[name] for name in names if tool.get(name) is not None}
        tools.append({"type": "function", "function": function})
        kept.append({"type": "function", **{name: tool.get(name) for name in names}})
    return tools, kept


def _tool_choice(choice: Any) -> Any:
    """The chat route's form of it; what that refuses goes on as it is."""
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind == "allowed_tools":
        return {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": choice.get("mode"),
                "tools": [_tool_choice(tool) for tool in choice.get("tools") or []],
            },
        }
    return choice


def _response_format(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if given is None or given.get("type") != "json_schema":
        return None if given is None else dict(given)
    names = ("name", "description", "schema", "strict")
    return {"type": "json_schema", "json_schema": {n: given[n] for n in names if given.get(n) is not None}}
