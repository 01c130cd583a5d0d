"""The object and the events of POST /v1/responses.

Owns output items, the order of events and what a response says of itself. The whole response is what the
events of its stream leave behind, so both say the same. Knows no engine.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from lmdeploy.engine.request import TokenLogprobs
from lmdeploy.errors import LMDeployError
from lmdeploy.serve.generation import Usage
from lmdeploy.serve.parsers.answer import Said
from lmdeploy.serve.parsers.base import Reasoning, Text, ToolArguments, ToolStart
from lmdeploy.serve.sse import KEEP_ALIVE
from lmdeploy.serve.translated import event

Emit = Callable[..., bytes]


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


class _Words:
    """An output item of words: a message, or reasoning."""

    def __init__(self, emit: Emit, index: int, reasoning: bool) -> None:
        self._emit = emit
        self._name = "reasoning_text" if reasoning else "output_text"
        own = {"type": "reasoning", "summary": []} if reasoning else {"type": "message", "role": "assistant"}
        self.item: dict[str, Any] = {
            "id": _new_id("rs" if reasoning else "msg"),
            "status": "in_progress",
            **own,
        }
        self.item["content"] = []
        self._where = {"item_id": self.item["id"], "output_index": index, "content_index": 0}
        self._pieces: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = {"type": self._name, "text": "".join(self._pieces)}
        return part | self._more({"annotations": [], "logprobs": self._logprobs})

    def _more(self, fields: dict[str, Any]) -> dict[str, Any]:
        """`fields` where the item is a message: reasoning has none of them."""
        return fields if self._name == "output_text" else {}

    def opened(self) -> bytes:
        added = {**self.item, "content": []}
        out = self._emit("output_item.added", output_index=self._where["output_index"], item=added)
        return out + self._emit("content_part.added", **self._where, part=self._part())

    def more(self, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        self._pieces.append(text)
        self._logprobs += logprobs
        return self._emit(
            f"{self._name}.delta", **self._where, delta=text, **self._more({"logprobs": logprobs})
        )

    def closed(self, status: str) -> bytes:
        part = self._part()
        self.item |= {"status": status, "content": [part]}
        told = {"text": part["text"], **self._more({"logprobs": self._logprobs})}
        out = self._emit(f"{self._name}.done", **self._where, **told)
        out += self._emit("content_part.done", **self._where, part=part)
        return out + self._emit("output_item.done", output_index=self._where["output_index"], item=self.item)


class _Call:
    """An output item that is a call of a function."""

    def __init__(self, emit: Emit, index: int, start: ToolStart) -> None:
        self._emit = emit
        self.item: dict[str, Any] = {
            "id": _new_id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": start.id,
            "name": start.name,
            "arguments": "",
        }
        self._where = {"item_id": self.item["id"], "output_index": index}
        self._pieces: list[str] = []

    def opened(self) -> bytes:
        return self._emit("output_item.added", output_index=self._where["output_index"], item=dict(self.item))

    def more(self, text: str) -> bytes:
        self._pieces.append(text)
        return self._emit("function_call_arguments.delta", **self._where, delta=text)

    def closed(self, status: str) -> bytes:
        arguments = "".join(self._pieces)
        self.item |= {"status": status, "arguments": arguments}
        told = {"name": self.item["name"], "arguments": arguments}
        out = self._emit("function_call_arguments.done", **self._where, **told)
        return out + self._emit("output_item.done", output_index=self._where["output_index"], item=self.item)


class ResponseEvents:
    """The events of one response. `head`: what it says of itself before anything is said.

    logprobs: turns the log-probabilities of tokens into their wire form; None where none are wanted.
    """

    keep_alive = KEEP_ALIVE

    def __init__(
        self,
        head: dict[str, Any],
        logprobs: Callable[[Sequence[TokenLogprobs]], list[dict[str, Any]]] | None = None,
    ) -> None:
        self.response: dict[str, Any] = {**head, "status": "in_progress", "output": []}
        self._logprobs = logprobs
        self._number = 0
        self._open: _Words | _Call | None = None
        self._finish: str | None = None

    def _emit(self, kind: str, **fields: Any) -> bytes:
        name = f"response.{kind}"
        ready = event(name, {"type": name, "sequence_number": self._number, **fields})
        self._number += 1
        return ready

    def begin(self, usage: Usage) -> bytes:
        response = self.response
        return self._emit("created", response=response) + self._emit("in_progress", response=response)

    def say(self, said: Said) -> bytes:
        out = b"".join(self._part(part, said) for part in said.parts)
        self._finish = said.finish_reason or self._finish
        return out

    def _part(self, part: Text | Reasoning | ToolStart | ToolArguments, said: Said) -> bytes:
        if isinstance(part, ToolStart):
            return self._next(_Call(self._emit, len(self.response["output"]), part))
        if isinstance(part, ToolArguments):
            assert isinstance(self._open, _Call)
            return self._open.more(part.text)
        reasoning = isinstance(part, Reasoning)
        out = b""
        if not isinstance(self._open, _Words) or (self._open.item["type"] == "reasoning") != reasoning:
            out = self._next(_Words(self._emit, len(self.response["output"]), reasoning))
        assert isinstance(self._open, _Words)
        wanted = self._logprobs if not reasoning and part is _last_text(said) else None
        return out + self._open.more(part.text, wanted(said.logprobs) if wanted else [])

    def _next(self, item: _Words | _Call) -> bytes:
        out = self._close("completed")
        self._open = item
        self.response["output"].append(item.item)
        return out + item.opened()

    def _close(self, status: str) -> bytes:
        last, self._open = self._open, None
        return last.closed(status) if last is not None else b""

    def end(self, usage: Usage) -> bytes:
        out = b""
        if not self.response["output"]:
            out = self._next(_Words(self._emit, 0, reasoning=False))
        cut = self._finish == "length"
        status = "incomplete" if cut else "completed"
        out += self._close(status)
        self.response |= {"status": status, "usage": _usage(usage)}
        if cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["completed_at"] = int(time.time())
        return out + self._emit(status, response=self.response)

    def fail(self, error: LMDeployError) -> bytes:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self.response |= {"status": "failed", "error": {"code": code, "message": error.message}}
        return self._emit("failed", response=self.response)


def _last_text(said: Said) -> Text | None:
    """The part that the tokens of this moment are counted to."""
    return next((part for part in reversed(said.parts) if isinstance(part, Text)), None)


def _usage(usage: Usage) -> dict[str, Any]:
    counts: Any = usage.body()
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": counts["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {
            "reasoning_tokens": counts["completion_tokens_details"]["reasoning_tokens"]
        },
        "total_tokens": counts["total_tokens"],
    }
