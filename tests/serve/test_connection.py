"""What clients may do to a connection: how long they may be silent, how much they may send."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
import pytest_asyncio
from serve_process import Server, chat, memory, running
from uvicorn.protocols.http.flow_control import FlowControl

from lmdeploy.serve import connection

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATIENCE = 0.6  # seconds that this server waits for a head or a body
BODIES = 4 << 20  # bytes of bodies that it holds at once


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server() -> AsyncIterator[Server]:
    limits = {"HEAD_SECONDS": PATIENCE, "BODY_SECONDS": PATIENCE, "UNREAD_SECONDS": PATIENCE}
    options = {"max_requests": 4, "max_body": BODIES, "max_bodies": BODIES}
    with running(script="One.", connection=limits, options=options) as server:
        yield server


def head(length: int, *lines: str) -> bytes:
    """The head of a request with a body of `length` bytes."""
    first = ["POST /v1/chat/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
    return "\r\n".join([*first, f"Content-Length: {length}", *lines, "", ""]).encode()


class Client:
    """One raw connection."""

    def __init__(self, server: Server) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self._address = host, int(port)

    async def __aenter__(self) -> Client:
        self.reader, self.writer = await asyncio.open_connection(*self._address)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def answer(self, patience: float = 5) -> tuple[int, Any]:
        """Status and JSON body of all that the server says until it ends the connection; 0: nothing."""
        try:
            data = await asyncio.wait_for(self.reader.read(), patience)
        except ConnectionResetError:
            return -1, None
        if not data:
            return 0, None
        top, _, body = data.partition(b"\r\n\r\n")
        assert b"content-type: application/json" in top
        return int(top.split()[1]), json.loads(body)


async def answers(server: Server) -> None:
    async with server.http() as http:
        response = await http.post("/v1/chat/completions", json=chat("there?"))
        assert response.status_code == 200


async def test_silent_connection_is_closed(server: Server) -> None:
    async with Client(server) as client:
        assert await client.answer() == (0, None)


@pytest.mark.parametrize("sent", [b"POST /v1/chat", head(10)[:-2], head(100), head(100) + b"{"])
async def test_unfinished_request_gets_408(server: Server, sent: bytes) -> None:
    async with Client(server) as client:
        client.writer.write(sent)
        status, body = await client.answer()
        assert status == 408
        assert "did not arrive" in body["error"]["message"]


@pytest.mark.parametrize("sent", [b"GET /heal", head(100)])
async def test_unfinished_second_request_gets_408(server: Server, sent: bytes) -> None:
    async with Client(server) as client:
        client.writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200" in await client.reader.readline()
        while await client.reader.read(1) != b"}":
            pass
        client.writer.write(sent)
        assert (await client.answer())[0] == 408


async def test_dripping_does_not_prolong_it(server: Server) -> None:
    """A byte now and then is no reason to wait longer."""
    async with Client(server) as client:
        started = time.monotonic()
        client.writer.write(head(10_000))
        answer = asyncio.create_task(client.answer())
        while not answer.done():
            client.writer.write(b" ")
            await asyncio.sleep(0.05)
        assert (await answer)[0] in (408, -1)
        assert time.monotonic() - started < 3 * PATIENCE


async def test_requests_without_body_take_no_place(server: Server) -> None:
    """Four requests are held at most here; twelve that never finish leave all four places to others."""
    clients = [Client(server) for _ in range(12)]
    for client in clients:
        await client.__aenter__()
        client.writer.write(head(1000) + b"{")
    await asyncio.sleep(0.1)
    await answers(server)
    for client in clients:
        await client.__aexit__()


async def test_answering_is_not_limited(server: Server) -> None:
    """The deadline is for the client: an answer may take longer."""
    with running(script="x", step_seconds=0.02, connection={"BODY_SECONDS": PATIENCE}) as slow:
        async with slow.http() as http:
            started = time.monotonic()
            response = await http.post("/v1/chat/completions", json=chat("x", max_tokens=80))
            assert response.status_code == 200
            assert time.monotonic() - started > 2 * PATIENCE


@pytest.mark.parametrize(
    "sent",
    [
        head(0, "x: " + "y" * 40_000),
        head(0, *(f"x{i}: y" for i in range(1200))),
        b"GET /" + b"x" * 40_000 + b" HTTP/1.1\r\n\r\n",
        head(0)[:-2] + b"x: " + b"y" * 300_000,  # no end
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nx: " + b"y" * 300_000,
    ],
    ids=["long header", "many headers", "long path", "header without end", "trailer without end"],
)
async def test_large_head_is_refused(server: Server, sent: bytes) -> None:
    async with Client(server) as client:
        client.writer.write(sent)
        status, body = await client.answer()
        # The kernel may drop an answer to a client that is still sending.
        assert status == -1 or (status == 431 and "head" in body["error"]["message"]) or status == 404
    await answers(server)


async def test_bodies_in_flight_have_a_limit(server: Server) -> None:
    """Unfinished bodies of 3 MiB, 12 of them, where 4 MiB may be held: the memory stays bounded."""
    before = memory(server.process.pid)
    clients = [Client(server) for _ in range(12)]
    for client in clients:
        await client.__aenter__()
        client.writer.write(head(4 << 20) + b" " * (3 << 20))
    await asyncio.sleep(0.4)
    assert memory(server.process.pid) - before < 12 << 20
    statuses = [(await client.answer())[0] for client in clients]
    assert statuses.count(408) <= 1 and statuses.count(429) >= 8, statuses
    for client in clients:
        await client.__aexit__()
    await answers(server)


async def test_no_http_gets_json(server: Server) -> None:
    async with Client(server) as client:
        client.writer.write(b"nonsense\r\n\r\n")
        status, body = await client.answer()
        assert (status, body["error"]["type"]) == (400, "invalid_request_error")


def open_files(server: Server) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


async def test_answers_that_are_not_read_do_not_wait_for_ever(server: Server) -> None:
    """Many megabytes of answers, more than all buffers on the way hold."""
    before = open_files(server)
    async with Client(server) as client:
        client.writer.transport.pause_reading()
        client.writer.write(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 600)
        await asyncio.sleep(0.2)
        assert open_files(server) == before + 1
        deadline = time.monotonic() + 10
        while open_files(server) > before:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
    await answers(server)


class Gone:
    """A closed transport, as uvloop behaves: every call fails, before anyone is told of the end."""

    def is_closing(self) -> bool:
        return True

    def write(self, data: bytes) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    def pause_reading(self) -> None:
        self.write(b"")

    def resume_reading(self) -> None:
        self.write(b"")


async def test_a_dead_transport_is_a_disconnect() -> None:
    """Until the event loop tells of the end, what is done with the connection is ignored."""
    transport: Any = connection._Transport(cast(Any, Gone()), asyncio.get_running_loop())
    flow = FlowControl(transport)
    flow.pause_reading()
    flow.resume_reading()
    transport.write(b"x")
