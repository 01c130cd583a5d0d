"""One client connection: what it may send, how much of it, and how long it may take.

Owns the limits on heads and on waiting for the client, and the answers to what is no HTTP. Every wait for a
client ends: a connection that says nothing, a head or a body that does not arrive, an answer that nobody
reads, silence between requests (`timeout_keep_alive` of the web server). Knows no route.

The end of a client's data is the end of the client: one that closes only its sending side cannot be told from
one that has left, whose answer must not be computed on.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from lmdeploy.serve.errors import HttpError, error_body

HEAD_SECONDS = 30.0  # from the connection, or from the first byte of a later request, to the end of its head
BODY_SECONDS = 60.0  # from the end of the head to the end of the body
UNREAD_SECONDS = 60.0  # that an answer may wait for a client to read, and a closed connection for the rest
MAX_HEAD = 32 << 10  # bytes of request line and headers, each counted with _HEADER_COST more
_HEADER_COST = 32


class _Transport:
    """A transport that ignores what comes after its end: the connection's task hears of the end later."""

    def __init__(self, inner: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._inner, self._loop = inner, loop
        self._last: asyncio.TimerHandle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def close(self) -> None:
        """Close when all is sent, or after a while without that."""
        if not self._inner.is_closing():
            self._inner.close()
            self._last = self._loop.call_later(UNREAD_SECONDS, self._inner.abort)

    def forget(self) -> None:
        """The connection has ended."""
        if self._last is not None:
            self._last.cancel()

    def write(self, data: bytes) -> None:
        if not self._inner.is_closing():
            self._inner.write(data)

    def pause_reading(self) -> None:
        if not self._inner.is_closing():
            self._inner.pause_reading()

    def resume_reading(self) -> None:
        if not self._inner.is_closing():
            self._inner.resume_reading()


class Connection(HttpToolsProtocol):  # type: ignore[misc]
    """uvicorn's HTTP connection with limits; it sends each event at once."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._deadline: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None
        self._problem: HttpError | None = None
        self._begun = False  # something of a request has come that is not complete
        self._in_body = False  # the head is complete and given to the application
        self._head = 0  # bytes of this request's head
        self._unread = 0  # bytes since the parser last made something of them
        sock = transport.get_extra_info("socket")
        if sock is not None:
            # A socket that was bound before has Nagle's algorithm still on.
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(_Transport(transport, self.loop))
        self._expect(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None)
        self._unset_keepalive_if_required()
        self._unstick()
        super().connection_lost(exc)
        self.transport.forget()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._unstick()
        super().resume_writing()

    def _unstick(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def data_received(self, data: bytes) -> None:
        self._begun = True
        if self._deadline is None:
            self._expect(HEAD_SECONDS)
        self._unread += len(data)
        super().data_received(data)
        if self._unread > MAX_HEAD and not self.transport.is_closing():
            self._refuse(_too_large())

    # Parser callbacks. An exception in one ends in send_400_response.

    def on_message_begin(self) -> None:
        self._begun, self._head, self._unread = True, 0, 0
        if self._deadline is None:
            self._expect(HEAD_SECONDS)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value) + _HEADER_COST)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._in_body = True
        self._expect(BODY_SECONDS)

    def on_chunk_header(self) -> None:
        self._unread = 0

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._begun, self._in_body, self._unread = False, False, 0
        self._expect(None)
        super().on_message_complete()

    def _count(self, size: int) -> None:
        self._unread = 0
        self._head += size
        if self._head > MAX_HEAD:
            self._problem = _too_large()
            raise self._problem

    # The end of patience.

    def _expect(self, seconds: float | None) -> None:
        """What the client is sending must be complete after `seconds`; None: nothing is expected."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self._late, seconds)

    def _late(self, seconds: float) -> None:
        self._deadline = None
        if self.flow.read_paused:  # it is we who do not read
            self._expect(seconds)
        elif not self._begun:
            self.transport.close()
        else:
            self._refuse(HttpError(408, f"The request did not arrive within {seconds:g} seconds."))

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn when the parser gives up."""
        self._refuse(self._problem or HttpError(400, "This is not a valid HTTP request."))

    def _refuse(self, error: HttpError) -> None:
        """Answer for the application and end the connection; just end it where an answer has begun."""
        self._expect(None)
        if self._may_answer():
            body = msgspec.json.encode(error_body(error))
            head = STATUS_LINE[error.status] + b"content-type: application/json\r\nconnection: close\r\n"
            self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        if self.cycle is not None:
            self.cycle.disconnected = True  # the application must not answer as well
            self.cycle.message_event.set()
        self.transport.close()

    def _may_answer(self) -> bool:
        """Nothing of an answer to this request is out, and no earlier answer is on its way."""
        if self.cycle is None:
            return True
        if self._in_body:
            return not self.cycle.response_started and not self.pipeline
        complete: bool = self.cycle.response_complete
        return complete


def _too_large() -> HttpError:
    return HttpError(431, f"The request's head is larger than the limit of {MAX_HEAD} bytes.")
