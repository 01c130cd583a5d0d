"""Reads streams the way strict clients do: every rule of the format that is broken fails the test."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import httpx

USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass
class Seen:
    """What a stream said, by choice."""

    text: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    reasoning: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    calls: dict[int, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    finish: dict[int, str] = field(default_factory=dict)
    stop_reason: dict[int, Any] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    chunks: list[dict[str, Any]] = field(default_factory=list)
    comments: int = 0


def read_chat(body: str, usage: bool = False) -> Seen:
    """A chat stream, checked."""
    return _read(body, "chat.completion.chunk", usage)


def read_completion(body: str, usage: bool = False) -> Seen:
    """A completions stream, checked."""
    return _read(body, "text_completion", usage)


def _read(body: str, kind: str, usage: bool) -> Seen:
    seen = Seen()
    assert body.endswith("\n\n")
    events = body.removesuffix("\n\n").split("\n\n")
    assert events[-1] == "data: [DONE]"
    for event in events[:-1]:
        assert "\n" not in event
        if event.startswith(":"):
            seen.comments += 1
            continue
        assert event.startswith("data: ")
        chunk = json.loads(event.removeprefix("data: "))
        assert seen.error is None, "nothing but [DONE] follows an error"
        assert seen.usage is None, "nothing but [DONE] follows the usage"
        if "error" in chunk:
            check_error(chunk)
            seen.error = chunk["error"]
        else:
            _take(seen, chunk, kind, usage)
    if seen.error is None:
        assert set(seen.finish) == set(seen.text), "each choice has one finish_reason"
        assert (seen.usage is not None) == usage
    return seen


def _take(seen: Seen, chunk: dict[str, Any], kind: str, usage: bool) -> None:
    first = seen.chunks[0] if seen.chunks else chunk
    seen.chunks.append(chunk)
    assert chunk["object"] == kind
    for name in ("id", "created", "model", "system_fingerprint"):
        assert chunk[name] == first[name]
    if not chunk["choices"]:
        assert usage
        seen.usage = chunk["usage"]
        return
    assert ("usage" in chunk) == usage
    (choice,) = chunk["choices"]
    index = choice["index"]
    assert index not in seen.finish, "nothing follows the finish_reason of a choice"
    new = index not in seen.text
    if kind == "text_completion":
        text = choice["text"]
        assert text or choice["finish_reason"] or choice["logprobs"] or choice.get("token_ids")
    else:
        text = _delta_text(seen, choice, new)
    seen.text[index] += text
    if choice["logprobs"]:
        seen.logprobs[index].append(choice["logprobs"])
    assert "finish_reason" in choice
    if choice["finish_reason"] is not None:
        seen.finish[index] = choice["finish_reason"]
        seen.stop_reason[index] = choice["stop_reason"]


def _delta_text(seen: Seen, choice: dict[str, Any], new: bool) -> str:
    delta = choice["delta"]
    if set(delta) == {"reasoning_content", "reasoning"}:
        assert delta["reasoning"] == delta["reasoning_content"] != ""
        seen.reasoning[choice["index"]] += delta["reasoning"]
        return ""
    if set(delta) == {"tool_calls"}:
        _take_calls(seen.calls[choice["index"]], delta["tool_calls"])
        return ""
    if new:
        assert delta == {"role": "assistant", "content": ""}
    else:
        assert "role" not in delta
    if choice["finish_reason"] is not None:
        assert delta == {}
    elif not new:
        assert delta["content"] or choice["logprobs"] or choice.get("token_ids")
    return str(delta.get("content", ""))


def _take_calls(calls: list[dict[str, Any]], deltas: list[dict[str, Any]]) -> None:
    """id, type and name come once, with the first delta of a call; then only arguments."""
    (delta,) = deltas
    if delta["index"] == len(calls):
        assert set(delta) == {"index", "id", "type", "function"}
        assert (delta["type"], delta["function"]["arguments"]) == ("function", "")
        calls.append({"id": delta["id"], "type": "function", "function": dict(delta["function"])})
    else:
        assert set(delta) == {"index", "function"}
        assert set(delta["function"]) == {"arguments"}
        assert delta["index"] == len(calls) - 1
        calls[-1]["function"]["arguments"] += delta["function"]["arguments"]


def check_error(body: dict[str, Any]) -> None:
    """The nested form, with all four keys, and nothing of the server's inside."""
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    message = body["error"]["message"]
    assert isinstance(message, str)
    assert message
    for leak in ("Traceback", "pydantic", "Input should", "validation error", '.py"'):
        assert leak not in message


def counts(usage: dict[str, Any]) -> tuple[int, int, int]:
    """Without cached_tokens: the second of two equal requests finds the prompt in the cache."""
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]


def error_of(
    response: httpx.Response, status: int = 400, kind: str = "invalid_request_error"
) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    check_error(body)
    assert body["error"]["type"] == kind
    found: dict[str, Any] = body["error"]
    return found
