"""Server-sent events as ready bytes.

Owns framing, the constant parts of a chunk and the end of a stream. Knows no route's fields.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from lmdeploy.errors import LMDeployError
from lmdeploy.serve.errors import error_body, internal_error, logger, note

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

encode = msgspec.json.encode


class ChunkWriter:
    """Writes the chunks of one stream: what is equal in all of them is encoded once."""

    def __init__(self, head: dict[str, object], with_usage: bool) -> None:
        self._head = b"data: " + encode(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"

    def chunk(self, choice: bytes, usage: bytes | None = None) -> bytes:
        """One event with one choice, given as JSON; `usage` as JSON replaces the usual null."""
        tail = self._tail if usage is None else b'],"usage":' + usage + b"}\n\n"
        return self._head + choice + tail

    def usage(self, usage: bytes) -> bytes:
        """The event without choices that carries the token counts."""
        return self.chunk(b"", usage)


def error_event(error: LMDeployError) -> bytes:
    note(error)
    return b"data: " + encode(error_body(error)) + b"\n\n"


async def ending_well(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The same events; a failure becomes an error event, and `[DONE]` is always the last."""
    try:
        async with aclosing(events):
            async for event in events:
                yield event
    except LMDeployError as error:
        yield error_event(error)
    except Exception:  # the edge of a request whose status is already sent
        logger.exception("a stream failed")
        yield error_event(internal_error())
    yield DONE
