"""The object and the events of POST /v1/messages.

Owns content blocks, the order of events and the reasons an answer ended. The whole message is what the events
of its stream leave behind, so both say the same. Knows no engine.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from lmdeploy.errors import LMDeployError
from lmdeploy.serve.anthropic.errors import error_body
from lmdeploy.serve.generation import Usage
from lmdeploy.serve.parsers.answer import Said
from lmdeploy.serve.parsers.base import Part, Reasoning, Text, ToolStart
from lmdeploy.serve.translated import event

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageEvents:
    """The events of one message. `stops`: the stop sequences the client gave."""

    keep_alive = event("ping", {"type": "ping"})

    def __init__(self, message_id: str, model: str, stops: list[str]) -> None:
        self.message: dict[str, Any] = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._stops = stops
        self._pieces: list[str] | None = None  # of the block that is open
        self._called = False

    @property
    def _blocks(self) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = self.message["content"]
        return blocks

    def begin(self, usage: Usage) -> bytes:
        message = {**self.message, "usage": {**_usage(usage), "output_tokens": 0}}
        return event("message_start", {"type": "message_start", "message": message})

    def say(self, said: Said) -> bytes:
        out = b"".join(map(self._part, said.parts))
        if said.finish_reason is not None:
            self._ends(said)
        return out

    def _ends(self, said: Said) -> None:
        reason = _REASONS[said.finish_reason or "stop"]
        if reason == "end_turn" and self._called:  # also where the chat route says stop: a named call
            reason = "tool_use"
        if reason == "end_turn" and said.stop_reason in self._stops:
            self.message |= {"stop_reason": "stop_sequence", "stop_sequence": said.stop_reason}
        else:
            self.message["stop_reason"] = reason

    def _part(self, part: Part) -> bytes:
        if isinstance(part, ToolStart):
            self._called = True
            return self._open({"type": "tool_use", "id": part.id, "name": part.name, "input": {}})
        if isinstance(part, Text):
            block, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": part.text}
        elif isinstance(part, Reasoning):
            block = {"type": "thinking", "thinking": "", "signature": ""}
            delta = {"type": "thinking_delta", "thinking": part.text}
        else:
            block, delta = None, {"type": "input_json_delta", "partial_json": part.text}
        out = b"" if block is None or self._is_open(block["type"]) else self._open(block)
        assert self._pieces is not None
        self._pieces.append(part.text)
        return out + self._delta(delta)

    def _is_open(self, kind: str) -> bool:
        return self._pieces is not None and self._blocks[-1]["type"] == kind

    def _delta(self, delta: dict[str, str]) -> bytes:
        fields = {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}
        return event("content_block_delta", fields)

    def _open(self, block: dict[str, Any]) -> bytes:
        out = self._close()
        self._blocks.append(block)
        self._pieces = []
        fields = {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}
        return out + event("content_block_start", fields)

    def _close(self) -> bytes:
        if self._pieces is None:
            return b""
        block, text = self._blocks[-1], "".join(self._pieces)
        self._pieces = None
        out = b""
        if block["type"] == "tool_use":
            block["input"] = _object(text)
        elif block["type"] == "text":
            block["text"] = text
        else:
            # Clients give thoughts back only if they were signed; nothing here checks the signature.
            signature = hashlib.sha256(text.encode()).hexdigest()
            block |= {"thinking": text, "signature": signature}
            out = self._delta({"type": "signature_delta", "signature": signature})
        index = len(self._blocks) - 1
        return out + event("content_block_stop", {"type": "content_block_stop", "index": index})

    def end(self, usage: Usage) -> bytes:
        out = self._open({"type": "text", "text": ""}) if not self._blocks else b""
        out += self._close()
        self.message["usage"] = _usage(usage)
        delta = {name: self.message[name] for name in ("stop_reason", "stop_sequence")}
        last = {"type": "message_delta", "delta": delta, "usage": self.message["usage"]}
        return out + event("message_delta", last) + event("message_stop", {"type": "message_stop"})

    def fail(self, error: LMDeployError) -> bytes:
        return event("error", error_body(error.status, error.message))


def _object(text: str) -> dict[str, Any]:
    """Arguments as an object; what was cut short or is none is given as it stands, under one name."""
    try:
        value = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        value = text
    return value if isinstance(value, dict) else {"_arguments": text}


def _usage(usage: Usage) -> dict[str, Any]:
    """The input without what was found in the cache, which is counted apart."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }
