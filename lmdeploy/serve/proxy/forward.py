"""One request through the proxy: read, sent to a node, its answer passed on as it comes.

Owns when a request is sent again: as long as the client has been told nothing, to another node, after the
first one broke off or said that it takes none. What a client has been told stays; a stream then ends with an
error event. Status, headers and body of an answer are not changed.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lmdeploy.errors import EngineDeadError, LMDeployError, OverloadedError
from lmdeploy.runtime.memory_plan import MAX_BODIES
from lmdeploy.serve.errors import HttpError
from lmdeploy.serve.proxy.events import WholeEvents, broken_off, refused_late
from lmdeploy.serve.proxy.nodes import Health, Node, Nodes
from lmdeploy.serve.proxy.routing import Router, Wanted, wanted
from lmdeploy.serve.proxy.upstream import Answer, Headers, UpstreamError
from lmdeploy.serve.record import RECORD
from lmdeploy.serve.transport import while_connected

logger = logging.getLogger("lmdeploy.serve.proxy")

_MOST_BREAKS = 3  # nodes that one request may bring down
_WHOLE = (
    1 << 20
)  # bytes: a shorter answer is passed on when it is complete, and may be asked for again until then
# Of one connection, not of the message; or written anew for the next connection.
_OF_CONNECTION = {
    b"connection",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
}
_NOT_SENT = _OF_CONNECTION | {b"host", b"content-length", b"expect", b"x-request-id"}
_KEYS = {b"authorization", b"x-api-key"}
_NOT_RETURNED = _OF_CONNECTION | {b"date", b"server", b"x-request-id"}


@dataclass(slots=True)
class Proxy:
    """What all requests share. `node_key`: shown to nodes in place of the client's own."""

    nodes: Nodes
    router: Router
    node_key: str | None = None
    max_body: int = MAX_BODIES
    max_bodies: int = MAX_BODIES  # of all bodies that are held until their answer begins
    max_requests: int = 1 << 16
    draining: bool = False
    active: int = 0
    body_bytes: int = 0
    retries: int = 0

    def own_headers(self) -> Headers:
        """Of a request that the proxy makes itself."""
        return [] if self.node_key is None else [(b"authorization", f"Bearer {self.node_key}".encode())]


@dataclass(slots=True)
class Held:
    """A request that can be sent, also again."""

    method: str
    path: str
    target: str
    headers: Headers
    body: bytes
    wanted: Wanted
    tried: list[Node] = field(default_factory=list)


async def forward(proxy: Proxy, request: Request) -> Response:
    """The answer of one of the nodes."""
    if proxy.draining:
        raise EngineDeadError("The proxy is shutting down.")
    if proxy.active >= proxy.max_requests:
        raise OverloadedError(f"The proxy already holds {proxy.active} requests; try again later.")
    body = await _read_body(proxy, request)
    query = request.url.query
    target = request.scope["raw_path"].decode("ascii") if "raw_path" in request.scope else request.url.path
    held = Held(
        request.method,
        request.url.path,
        target.partition("?")[0] + (f"?{query}" if query else ""),
        _sent_headers(proxy, request),
        body,
        wanted(body) if body else Wanted(request.query_params.get("model")),
    )
    return Relay(proxy, held)


async def _read_body(proxy: Proxy, request: Request) -> bytes:
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            proxy.body_bytes += len(piece)
            if len(body) > proxy.max_body:
                text = f"The body is larger than the limit of {proxy.max_body} bytes."
                raise HttpError(413, text, "request_too_large")
            if proxy.body_bytes > proxy.max_bodies:
                raise OverloadedError("The proxy already holds as many bytes of requests as it may.")
    except BaseException:
        proxy.body_bytes -= len(body)
        raise
    return bytes(body)


def _sent_headers(proxy: Proxy, request: Request) -> Headers:
    left_out = _NOT_SENT | (_KEYS if proxy.node_key is not None else set())
    sent = [(name, value) for name, value in request.headers.raw if name not in left_out]
    if request.client is not None:
        sent.append((b"x-forwarded-for", request.client.host.encode()))
    if (record := RECORD.get()) is not None:
        sent.append((b"x-request-id", record.request_id.encode()))
    return [*sent, *proxy.own_headers()]


class Relay(Response):
    """Passes the answer on, and lets go of the node as soon as the client has left."""

    def __init__(self, proxy: Proxy, held: Held) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers()
        self._proxy = proxy
        self._held = held
        self._begun = False  # the head has been sent to the client
        self._told = False  # more than comments

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._proxy.active += 1
        try:
            with contextlib.suppress(ClientDisconnect):
                await while_connected(receive, self._answer(send))
        finally:
            self._proxy.active -= 1
            self._proxy.body_bytes -= len(self._held.body)

    async def _answer(self, send: Send) -> None:
        refusal: tuple[Answer, bytes] | None = None
        breaks = 0
        while True:
            try:
                node = self._next_node()
            except LMDeployError as error:
                return await self._give_up(send, error, refusal)
            try:
                with node.holding():
                    refusal = await self._ask(node, send)
                if refusal is None:
                    return
                _not_ready(node)
            except UpstreamError as error:
                _lost(node, self._held, error)
                breaks += error.sent
                if self._told or breaks >= _MOST_BREAKS:
                    return await self._give_up(send, _gone(), None)
            self._held.tried.append(node)
            self._proxy.retries += 1

    def _next_node(self) -> Node:
        held, proxy = self._held, self._proxy
        return proxy.router.choose(proxy.nodes.candidates(held.wanted.model, held.tried), held.wanted)

    async def _ask(self, node: Node, send: Send) -> tuple[Answer, bytes] | None:
        """Pass its answer on; or the answer itself, when it says that the node takes no requests now."""
        held = self._held
        answer = await node.upstream.send(held.method, held.target, held.headers, held.body)
        async with answer:
            if answer.status == 503:
                return answer, await answer.read()
            if answer.header(b"content-type").startswith(b"text/event-stream") and answer.status == 200:
                await self._pass_events(answer, send)
            elif self._begun:
                await self._end(send, refused_late(held.path, await answer.read()))
            else:
                await self._pass_whole(answer, send)
        return None

    async def _pass_events(self, answer: Answer, send: Send) -> None:
        events = WholeEvents()
        await self._begin(answer, send)
        async for piece in answer.pieces():
            if ready := events.feed(piece):
                self._told = events.told
                await send({"type": "http.response.body", "body": ready, "more_body": True})
        await self._end(send, events.finish())

    async def _pass_whole(self, answer: Answer, send: Send) -> None:
        """In one piece where it is short; a longer one as it comes, and once begun it cannot be mended."""
        kept = b""
        pieces = answer.pieces()
        async for piece in pieces:
            kept += piece
            if len(kept) > _WHOLE:
                break
        self._told = len(kept) > _WHOLE
        await self._begin(answer, send)
        await send({"type": "http.response.body", "body": kept, "more_body": True})
        async for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await self._end(send, b"")

    async def _begin(self, answer: Answer, send: Send) -> None:
        if not self._begun:
            self._begun = True
            headers = [(name, value) for name, value in answer.headers if _returned(name)]
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})

    async def _end(self, send: Send, last: bytes) -> None:
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _give_up(self, send: Send, error: LMDeployError, refusal: tuple[Answer, bytes] | None) -> None:
        """Raises `error` where the client can still be given a status."""
        if self._begun:
            await self._end(send, broken_off(self._held.path, error))
        elif refusal is not None:
            answer, body = refusal
            await self._begin(answer, send)
            await self._end(send, body)
        else:
            raise error


def _returned(name: bytes) -> bool:
    """CORS is ours to say."""
    return name not in _NOT_RETURNED and not name.startswith(b"access-control-")


def _gone() -> EngineDeadError:
    return EngineDeadError("The server broke off while it worked on this request; try again.")


def _lost(node: Node, held: Held, error: UpstreamError) -> None:
    node.failed += 1
    logger.warning("%s: %s: %s", node.url, held.path, error)
    if not error.sent:
        node.health, node.problem = Health.DOWN, str(error)


def _not_ready(node: Node) -> None:
    if node.health is not Health.DOWN:
        node.health, node.problem = Health.NOT_READY, "it answered 503"
