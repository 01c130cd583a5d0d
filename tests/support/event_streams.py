"""Reads streams of named events the way strict clients do: every rule that is broken fails the test."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


def events(body: str) -> list[dict[str, Any]]:
    """The data of each event; its type must be the event's name. Comments are passed over."""
    assert body.endswith("\n\n")
    found = []
    for block in body.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        one = json.loads(data.removeprefix("data: "))
        assert name == f"event: {one['type']}"
        found.append(one)
    return found


@dataclass
class SeenResponse:
    """What a stream of /v1/responses said. `texts`: one for each message, joined from its deltas."""

    kinds: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    final: dict[str, Any] = field(default_factory=dict)


_ENDS = ("response.completed", "response.incomplete", "response.failed")
_DELTAS = {
    "response.output_text": "message",
    "response.reasoning_text": "reasoning",
    "response.function_call_arguments": "function_call",
}


def read_response(body: str) -> SeenResponse:
    """A stream of /v1/responses, checked: order, numbers, ids, and that deltas make the final output."""
    found = events(body)
    seen = SeenResponse([one["type"] for one in found])
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    assert seen.kinds[:2] == ["response.created", "response.in_progress"]
    assert [kind for kind in seen.kinds if kind in _ENDS] == seen.kinds[-1:]
    seen.final = found[-1]["response"]
    assert len({one["response"]["id"] for one in found if "response" in one}) == 1
    items = _items(found[2:-1], whole=seen.kinds[-1] != "response.failed")
    if seen.kinds[-1] != "response.failed":
        assert [item for item, _ in items] == seen.final["output"]
    seen.texts = [text for item, text in items if item["type"] == "message"]
    return seen


def _items(found: list[dict[str, Any]], whole: bool) -> list[tuple[dict[str, Any], str]]:
    """Each item with the text its deltas make; one is open at a time."""
    items: list[tuple[dict[str, Any], str]] = []
    opened: dict[str, Any] | None = None
    text, told = "", ""
    for one in found:
        kind, _, step = one["type"].rpartition(".")
        assert one["output_index"] == len(items)
        if one["type"] == "response.output_item.added":
            assert opened is None
            opened, text, told = one["item"], "", ""
            assert opened["status"] == "in_progress"
            continue
        assert opened is not None
        if one["type"] == "response.output_item.done":
            assert one["item"]["id"] == opened["id"]
            assert one["item"]["type"] == opened["type"]
            assert told == text == _text(one["item"])
            items.append((one["item"], text))
            opened = None
            continue
        assert one["item_id"] == opened["id"]
        if kind in _DELTAS:
            assert opened["type"] == _DELTAS[kind]
            if step == "delta":
                assert one["delta"]
                text += one["delta"]
            else:
                told = one.get("text", one.get("arguments"))
    assert opened is None or not whole
    return items


def _text(item: dict[str, Any]) -> str:
    return str(item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])


def read_message(body: str) -> dict[str, Any]:
    """A stream of /v1/messages, checked; gives the message that its events make."""
    found = [one for one in events(body) if one["type"] != "ping"]
    kinds = [one["type"] for one in found]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    message: dict[str, Any] = found[0]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    is_open = False
    for one in found[1:-2]:
        step = one["type"].removeprefix("content_block_")
        if step == "start":
            assert not is_open
            assert one["index"] == len(message["content"])
            message["content"].append({**one["content_block"], "_pieces": []})
        assert one["index"] == len(message["content"]) - 1
        if step == "delta":
            assert is_open
            _take(message["content"][-1], one["delta"])
        if step == "stop":
            assert is_open
            _settle(message["content"][-1])
        is_open = step != "stop"
    assert not is_open
    message |= found[-2]["delta"]
    message["usage"] |= found[-2]["usage"]
    return message


_FIELDS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
_KINDS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "tool_use"}


def _take(block: dict[str, Any], delta: dict[str, Any]) -> None:
    if delta["type"] == "signature_delta":
        assert block["type"] == "thinking"
        block["signature"] = delta["signature"]
        return
    assert block["type"] == _KINDS[delta["type"]]
    assert delta[_FIELDS[delta["type"]]]
    block["_pieces"].append(delta[_FIELDS[delta["type"]]])


def _settle(block: dict[str, Any]) -> None:
    text = "".join(block.pop("_pieces"))
    name = {"tool_use": "input"}.get(block["type"], block["type"])
    block[name] = json.loads(text or "{}") if name == "input" else text
