"""Event streams that pass through: only whole events, and a proper end when the source breaks off.

Knows framing and the error event of each protocol; no other field.
"""

from __future__ import annotations

from typing import Any

import msgspec

from lmdeploy.errors import EngineDeadError, LMDeployError
from lmdeploy.serve.sse import DONE, error_event

_ENDS = (b"\n\n", b"\r\n\r\n")


class WholeEvents:
    """Cuts a stream of bytes after its events. `told`: an event with data has been handed out."""

    def __init__(self) -> None:
        self._rest = b""
        self.told = False

    def feed(self, data: bytes) -> bytes:
        """All events that are complete now."""
        data = self._rest + data
        end = max(data.rfind(mark) + len(mark) if mark in data else 0 for mark in _ENDS)
        self._rest = data[end:]
        return self._seen(data[:end])

    def finish(self) -> bytes:
        """What is left at the end of a stream that has ended well."""
        rest, self._rest = self._rest, b""
        return self._seen(rest)

    def _seen(self, events: bytes) -> bytes:
        # Comments keep a connection alive; whoever has seen nothing else has not seen an answer.
        self.told = self.told or any(line and line[:1] != b":" for line in events.splitlines())
        return events


def broken_off(path: str, error: LMDeployError) -> bytes:
    """The end of a stream whose source is gone, in the protocol of a route."""
    if path == "/v1/messages":
        kind = "overloaded_error" if error.status in (429, 503) else "api_error"
        return _named_event({"type": "error", "error": {"type": kind, "message": error.message}})
    if path == "/v1/responses":
        return _named_event({"type": "error", "code": error.code, "message": error.message, "param": None})
    return error_event(error) + DONE


def _named_event(body: dict[str, Any]) -> bytes:
    return b"event: error\ndata: " + msgspec.json.encode(body) + b"\n\n"


def refused_late(path: str, body: bytes) -> bytes:
    """The same where another server refused what a silent stream had already been opened for."""
    try:
        message = msgspec.json.decode(body)["error"]["message"]
    except (msgspec.MsgspecError, KeyError, TypeError):
        message = "The server refused the request."
    return broken_off(path, EngineDeadError(str(message)))
