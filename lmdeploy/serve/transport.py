"""Bodies in, answers out, and clients that leave in between.

Owns content types, the size of bodies, the watch on the connection while an answer is made, and the response
class of streams. Knows no fields.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lmdeploy.errors import OverloadedError
from lmdeploy.serve.errors import HttpError
from lmdeploy.serve.served import Server
from lmdeploy.serve.sse import HEADERS

T = TypeVar("T")

_INLINE_BYTES = 16 << 10  # below this, parsing and encoding take less than handing them to a thread


async def from_body(request: Request, server: Server, prepare: Callable[[Server, bytearray], T]) -> T:
    """`prepare(server, body)`; the JSON body counts as held until then, and nothing here keeps it longer.

    Raises HttpError 413 and 415, and OverloadedError when the bodies of all requests become too large.
    """
    body = bytearray()
    try:
        await _read_body(request, server, body)
        return await _off_loop(len(body), prepare, server, body)
    finally:
        server.body_bytes -= len(body)


async def _read_body(request: Request, server: Server, body: bytearray) -> None:
    limit = server.options.max_body
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json":
        raise HttpError(415, f"Content-Type must be application/json, got {kind[:100]!r}.")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    async for piece in request.stream():
        body += piece
        server.body_bytes += len(piece)
        if len(body) > limit:
            raise _too_large(limit)
        if server.body_bytes > server.options.max_bodies:
            raise OverloadedError(
                "The server already holds as many bytes of requests as it may; try again later."
            )


def _too_large(limit: int) -> HttpError:
    return HttpError(413, f"The body is larger than the limit of {limit} bytes.", "request_too_large")


async def _off_loop(size: int, work: Callable[..., T], *args: Any) -> T:
    """`work(*args)` for a body of `size` bytes: in a thread unless it is short."""
    if size <= _INLINE_BYTES:
        return work(*args)
    return await asyncio.to_thread(work, *args)


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client leaves. Raises ClientDisconnect then.

    The body must have been read already: whatever the connection says next is its end.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for one in (task, watch):
            one.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await one


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def json_response(body: Any) -> Response:
    """msgspec writes NaN and infinity as null, so the answer is always JSON."""
    return Response(msgspec.json.encode(body), media_type="application/json")


class EventStream(Response):
    """Sends ready events as they come, and stops the source as soon as the client has left."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(HEADERS)
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnect):
            await while_connected(receive, self._pump(send))

    async def _pump(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
