"""Scripted servers for tests of the proxy: each says byte for byte what the test wants, also half of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from lmdeploy.serve.proxy.app import build_app
from lmdeploy.serve.proxy.forward import Proxy
from lmdeploy.serve.proxy.health import probe
from lmdeploy.serve.proxy.nodes import Nodes
from lmdeploy.serve.proxy.routing import Router

Writer = asyncio.StreamWriter
Script = Callable[["Seen", Writer], Awaitable[None]]
JSON = b'{"id":"x",  "choices":[]}'  # spaced as no encoder would
EVENTS = [b'data: {"n":1}\n\n', b'data: {"n":2}\n\n', b"data: [DONE]\n\n"]


@dataclass
class Seen:
    """One request as it arrived."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


async def answer(writer: Writer, body: bytes = JSON, status: str = "200 OK", **headers: str) -> None:
    head = {"content-type": "application/json", "content-length": str(len(body))}
    head.update({name.replace("_", "-"): value for name, value in headers.items()})
    lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
    writer.write(f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + body)
    await writer.drain()


async def begin_stream(writer: Writer) -> None:
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    await writer.drain()


async def chunk(writer: Writer, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))
    await writer.drain()


async def stream(seen: Seen, writer: Writer) -> None:
    await begin_stream(writer)
    for event in EVENTS:
        await chunk(writer, event)
    await chunk(writer, b"")


async def plain(seen: Seen, writer: Writer) -> None:
    await answer(writer)


async def hang(seen: Seen, writer: Writer) -> None:
    await asyncio.sleep(60)


async def break_off(seen: Seen, writer: Writer) -> None:
    writer.transport.abort()


@dataclass
class FakeNode:
    """A server; `script` answers its POST requests."""

    script: Script = plain
    models: tuple[str, ...] = ("m",)
    well: bool = True
    frozen: bool = False  # connections stay open, nothing is answered
    metrics: str = ""
    seen: list[Seen] = field(default_factory=list)
    closed: asyncio.Event = field(default_factory=asyncio.Event)  # a client has left
    connections: int = 0
    url: str = ""
    server: asyncio.Server | None = None
    writers: set[Writer] = field(default_factory=set)

    async def start(self) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def kill(self) -> None:
        assert self.server is not None
        self.server.close()
        for writer in self.writers:
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: Writer) -> None:
        self.connections += 1
        self.writers.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                seen = await _request(reader)
                work = asyncio.ensure_future(self._answer(seen, writer))
                gone = asyncio.ensure_future(_end_of(reader))
                await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    self.closed.set()
                for one in (work, gone):
                    one.cancel()
        self.writers.discard(writer)
        writer.close()

    async def _answer(self, seen: Seen, writer: Writer) -> None:
        if self.frozen:
            await hang(seen, writer)
        elif seen.target == "/health":
            await answer(writer, b"{}", "200 OK" if self.well else "503 Service Unavailable")
        elif seen.target == "/v1/models":
            cards = [{"id": name, "object": "model", "root": "/models/" + name} for name in self.models]
            await answer(writer, json.dumps({"object": "list", "data": cards}).encode())
        elif seen.target == "/metrics":
            await answer(writer, self.metrics.encode(), content_type="text/plain")
        else:
            self.seen.append(seen)
            await self.script(seen, writer)


async def _end_of(reader: asyncio.StreamReader) -> None:
    """Nothing is read: the next request stays where it is."""
    while not reader.at_eof():
        await asyncio.sleep(0.005)


async def _request(reader: asyncio.StreamReader) -> Seen:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = head[0].split(" ")
    headers = {}
    for line in filter(None, head[1:]):
        name, _, value = line.partition(": ")
        assert name not in headers, f"{name} was sent twice"
        headers[name] = value
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Seen(method, target, headers, body)


class Behind:
    """A proxy in this process before scripted nodes."""

    def __init__(self, nodes: list[FakeNode], strategy: str, keys: tuple[str, ...], **options: Any) -> None:
        self.nodes = nodes
        self.proxy = Proxy(Nodes(), Router(strategy, seed=0), **options)
        self.app = build_app(self.proxy, keys)
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://proxy")

    async def post(self, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def probe(self) -> None:
        for node in self.proxy.nodes:
            await probe(self.proxy, node)

    def asked(self) -> list[int]:
        """How many requests each node has got."""
        return [len(node.seen) for node in self.nodes]


@asynccontextmanager
async def behind(
    *nodes: FakeNode, strategy: str = "min_expected_latency", keys: tuple[str, ...] = (), **options: Any
) -> AsyncIterator[Behind]:
    for node in nodes:
        await node.start()
    found = Behind(list(nodes), strategy, keys, **options)
    for node in nodes:
        found.proxy.nodes.add(node.url)
    await found.probe()
    try:
        yield found
    finally:
        for one in found.proxy.nodes:
            one.upstream.abort("the test ends")
        for node in nodes:
            await node.kill()
