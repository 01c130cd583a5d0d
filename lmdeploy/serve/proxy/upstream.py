"""HTTP/1.1 to one other server: a request out, its answer in as it comes.

Owns connections, their reuse and how their end is told. The parser is the one of the serving side (llhttp);
a chunk costs a tenth of what it costs through a general client, and it is known whether any byte of an answer
has come, which decides whether a request may be sent again. Knows no route.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import cast
from urllib.parse import urlsplit

import httptools

from lmdeploy.errors import ConfigError

Headers = Sequence[tuple[bytes, bytes]]

CONNECT_SECONDS = 5.0
IDLE_SECONDS = 30.0  # that an unused connection is kept
_STALE_SECONDS = 1.0
_BUFFERED = 256 << 10  # bytes of an answer that wait for a slow reader before we stop reading
_MAX_HEAD = 64 << 10
# Probes of a silent connection: a machine that is gone is noticed after 30 seconds.
_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


class UpstreamError(Exception):
    """The server did not answer completely. `sent`: it may have begun to work on the request."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class _Wire(asyncio.Protocol):
    """One connection, which carries one exchange at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.closed = False
        self.failed = False  # we ended it
        self.idle_since = 0.0
        self._waiter: asyncio.Future[None] | None = None
        self.begin()

    def begin(self) -> None:
        """Forget the last exchange."""
        self._parser = httptools.HttpResponseParser(self)
        self.status = 0  # until the head is complete
        self.headers: list[tuple[bytes, bytes]] = []
        self.received = False  # any byte of an answer
        self.complete = False
        self._lasting = False  # the server keeps the connection
        self.problem = ""
        self._pieces: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._head_bytes = 0

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        with contextlib.suppress(OSError, AttributeError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE:
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def data_received(self, data: bytes) -> None:
        self.received = True
        try:
            self._parser.feed_data(data)
            self._head_bytes += 0 if self.status else len(data)
            if self._head_bytes > _MAX_HEAD:
                self.fail("the head of its answer is too large")
        except httptools.HttpParserError:
            self.fail("its answer is not valid HTTP")
        self._notify()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self.status and not self.complete and exc is None and not self._has_length():
            self.complete = True  # the end of the connection is the end of such a body
        elif not self.complete:
            self.problem = self.problem or "it closed the connection"
        self._notify()

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self.headers.clear()
        else:
            self.status = status

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._waiting_bytes += len(body)
        if self._waiting_bytes > _BUFFERED and not self.ended:
            self.transport.pause_reading()

    def on_message_complete(self) -> None:
        self.complete = bool(self.status)  # an interim answer has none
        self._lasting = bool(self._parser.should_keep_alive())

    # What an exchange calls.

    def fail(self, why: str) -> None:
        """Give up; whoever waits is told."""
        self.problem = self.problem or why
        self.closed = self.failed = True
        self.transport.abort()
        self._notify()

    async def head(self) -> None:
        """Until the head of the answer is here. Raises UpstreamError."""
        while not self.status:
            await self._more()

    async def piece(self) -> bytes:
        """The next part of the body, all that is there; empty at its end. Raises UpstreamError."""
        while not self._pieces and not self.complete:
            await self._more()
        data = b"".join(self._pieces)
        self._pieces.clear()
        if self._waiting_bytes > _BUFFERED and not self.ended:
            self.transport.resume_reading()
        self._waiting_bytes = 0
        return data

    @property
    def ended(self) -> bool:
        """The transport knows of the end before we are told; it must not be used any more then."""
        return self.closed or self.transport.is_closing()

    @property
    def reusable(self) -> bool:
        done = self.complete and not self._pieces and self._has_length()
        return done and not self.ended and self._lasting

    async def _more(self) -> None:
        if self.problem:
            raise UpstreamError(self.problem, sent=True)
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _notify(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _has_length(self) -> bool:
        names = {name for name, _ in self.headers}
        return self.status in (204, 304) or bool(names & {b"content-length", b"transfer-encoding"})


class Answer:
    """An answer whose head is complete; a context that gives its connection back or ends it."""

    def __init__(self, upstream: Upstream, wire: _Wire) -> None:
        self._upstream = upstream
        self._wire = wire
        self.status = wire.status
        self.headers = list(wire.headers)

    def header(self, name: bytes) -> bytes:
        return next((value for key, value in self.headers if key == name), b"")

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises UpstreamError when it breaks off."""
        while piece := await self._wire.piece():
            yield piece

    async def read(self) -> bytes:
        """The whole body. Raises UpstreamError when it breaks off."""
        return b"".join([piece async for piece in self.pieces()])

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._upstream.release(self._wire)


class Upstream:
    """One server at a base URL. Raises ConfigError for what is no such URL."""

    def __init__(self, url: str) -> None:
        self.host, self.port, self._prefix, secure = _parts(url)
        self._ssl = ssl.create_default_context() if secure else None
        usual = 443 if secure else 80
        name = f"[{self.host}]" if ":" in self.host else self.host
        self._host_header = (name if self.port == usual else f"{name}:{self.port}").encode()
        self._idle: list[_Wire] = []
        self._busy: set[_Wire] = set()

    async def send(self, method: str, target: str, headers: Headers = (), body: bytes = b"") -> Answer:
        """Send a request; returns when the head of the answer is here. Raises UpstreamError.

        An unused connection that the server has closed in the meantime is replaced by a new one. That it had
        been closed is told from how soon it ends: later, the server may have worked on the request.
        """
        data = self._encoded(method, target, headers, body)
        wire = self._unused()
        if wire is None:
            return await self._exchange(await self._connected(), data)
        now = asyncio.get_running_loop().time
        began = now()
        try:
            return await self._exchange(wire, data)
        except UpstreamError:
            if wire.received or wire.failed or now() - began > _STALE_SECONDS:
                raise
        try:
            return await self._exchange(await self._connected(), data)
        except UpstreamError as error:
            raise UpstreamError(str(error), sent=True) from None

    def abort(self, why: str) -> None:
        """End every exchange that is going on, and every unused connection."""
        for wire in [*self._busy, *self._idle]:
            wire.fail(why)
        self._idle.clear()

    def release(self, wire: _Wire) -> None:
        self._busy.discard(wire)
        if wire.reusable:
            wire.begin()
            wire.idle_since = asyncio.get_running_loop().time()
            self._idle.append(wire)
        elif not wire.closed:
            wire.fail("given up")

    def _unused(self) -> _Wire | None:
        """The connection used last: the others may then be closed in time."""
        now = asyncio.get_running_loop().time()
        for wire in [w for w in self._idle if w.ended or now - w.idle_since > IDLE_SECONDS]:
            self._idle.remove(wire)
            wire.fail("unused")
        return self._idle.pop() if self._idle else None

    async def _connected(self) -> _Wire:
        loop = asyncio.get_running_loop()
        connecting = loop.create_connection(_Wire, self.host, self.port, ssl=self._ssl)
        try:
            _, wire = await asyncio.wait_for(connecting, CONNECT_SECONDS)
        except asyncio.TimeoutError:
            raise UpstreamError(f"no connection within {CONNECT_SECONDS:g} s", sent=False) from None
        except OSError as error:
            raise UpstreamError(f"no connection: {error.strerror or error}", sent=False) from None
        return wire

    async def _exchange(self, wire: _Wire, data: bytes) -> Answer:
        self._busy.add(wire)
        try:
            if wire.ended:
                raise UpstreamError("it closed the connection", sent=False)
            wire.transport.write(data)
            await wire.head()
        except BaseException:
            self.release(wire)
            raise
        return Answer(self, wire)

    def _encoded(self, method: str, target: str, headers: Headers, body: bytes) -> bytes:
        lines = [f"{method} {self._prefix}{target} HTTP/1.1".encode("ascii")]
        lines += [b"host: " + self._host_header]
        lines += [name + b": " + value for name, value in headers]
        if body or method == "POST":
            lines.append(b"content-length: %d" % len(body))
        return b"\r\n".join([*lines, b"", body])


def _parts(url: str) -> tuple[str, int, str, bool]:
    """Host, port, path before every target, TLS."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    plain = url.isascii() and url.isprintable() and " " not in url
    extra = parts.query or parts.fragment or parts.username or parts.password
    if not plain or parts.scheme not in ("http", "https") or not parts.hostname or extra:
        raise ConfigError(f"{url[:200]!r} is not the URL of a server; write it as http://host:23333")
    secure = parts.scheme == "https"
    return parts.hostname, port or (443 if secure else 80), parts.path.rstrip("/"), secure
