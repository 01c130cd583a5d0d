"""The server as a process: connections that break, engines that die, signals, memory."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from serve_process import Server, chat, memory, running
from serve_wire import read_chat, read_completion

from lmdeploy.serve.launch import PortInUseError, bind

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCRIPT = "One, two, three, four."


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server() -> AsyncIterator[Server]:
    with running(script=SCRIPT, step_seconds=0.002) as server:
        yield server


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def http(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with server.http() as http:
        yield http


async def until_empty(http: httpx.AsyncClient, seconds: float = 2.0) -> None:
    """Waits until the engine holds no request and no block."""
    deadline = time.monotonic() + seconds
    while True:
        stats = (await http.get("/stats")).json()
        if (stats["running"], stats["waiting"], stats["blocks_held"]) == (0, 0, 0):
            return
        assert time.monotonic() < deadline, stats
        await asyncio.sleep(0.02)


async def answers(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/chat/completions", json=chat("still there?"))
    assert response.status_code == 200
    assert response.json()["choices"][0]["message"]["content"].startswith(SCRIPT)


async def test_32_streams_at_once(server: Server) -> None:
    """The official client; each stream equals the answer to the same request alone."""
    async with openai.AsyncOpenAI(api_key="x", base_url=server.url + "/v1", max_retries=0) as client:

        async def text(number: int) -> str:
            stream = await client.chat.completions.create(
                model="byte-model",
                messages=[{"role": "user", "content": f"question {number}"}],
                max_tokens=40,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
            parts, usage = [], None
            async for chunk in stream:
                usage = chunk.usage or usage
                parts += [c.delta.content or "" for c in chunk.choices]
            assert usage is not None
            return "".join(parts)

        together = await asyncio.gather(*(text(i) for i in range(32)))
        assert all(t.startswith(SCRIPT) for t in together)
        assert len(set(together)) > 16
        assert [await text(i) for i in (0, 13, 31)] == [together[i] for i in (0, 13, 31)]


async def leave_after_two_chunks(http: httpx.AsyncClient, number: int) -> None:
    body = chat(f"stream {number}", max_tokens=400, stream=True)
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        chunks = 0
        async for line in response.aiter_lines():
            chunks += line.startswith("data: ")
            if chunks == 3:
                return


async def test_clients_that_leave_free_everything(http: httpx.AsyncClient) -> None:
    """300 streams closed after two chunks, 8 at a time."""
    gate = asyncio.Semaphore(8)

    async def one(number: int) -> None:
        async with gate:
            await leave_after_two_chunks(http, number)

    await asyncio.gather(*(one(i) for i in range(300)))
    await until_empty(http)
    await answers(http)


async def test_a_client_that_leaves_frees_its_blocks_within_one_step() -> None:
    """Steps of 0.3 s: after the one that runs while the client leaves, the engine computes no other."""
    with running(script=SCRIPT, step_seconds=0.3) as server:
        async with server.http() as http:
            await leave_after_two_chunks(http, 0)
            left = (await http.get("/stats")).json()["totals"]["steps"]
            await until_empty(http)
            assert (await http.get("/stats")).json()["totals"]["steps"] <= left + 1


async def test_unstreamed_clients_that_leave_free_everything(http: httpx.AsyncClient) -> None:
    async def one(number: int) -> None:
        body = {"prompt": f"p {number}", "max_tokens": 480, "temperature": 0, "ignore_eos": True}
        with pytest.raises(httpx.ReadTimeout):
            await http.post("/v1/completions", json=body, timeout=0.2)

    await asyncio.gather(*(one(i) for i in range(24)))  # 8 run, 16 wait
    await until_empty(http)
    await answers(http)


async def test_leaving_is_noticed_within_a_step(http: httpx.AsyncClient) -> None:
    await leave_after_two_chunks(http, 1)
    started = time.monotonic()
    await until_empty(http)
    assert time.monotonic() - started < 0.5


async def test_large_bodies_hold_nobody_up(http: httpx.AsyncClient) -> None:
    """A 20 MB prompt beside a stream and a probe of /health every 50 ms."""
    gaps: list[float] = []
    done = asyncio.Event()

    async def probe() -> None:
        while not done.is_set():
            started = time.monotonic()
            assert (await http.get("/health")).status_code == 200
            gaps.append(time.monotonic() - started)
            await asyncio.sleep(0.05)

    async def stream() -> str:
        body = chat("x", max_tokens=300, stream=True)
        return read_chat((await http.post("/v1/chat/completions", json=body)).text).text[0]

    raw = json.dumps(chat("word " * 4_000_000)).encode()
    probing, streaming = asyncio.create_task(probe()), asyncio.create_task(stream())
    await asyncio.sleep(0.1)
    url = str(http.base_url) + "/v1/chat/completions"
    status, body = await post_from_elsewhere(url, raw)
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert (await streaming).startswith(SCRIPT)
    done.set()
    await probing
    assert max(gaps) < 0.2


SENDER = """
import sys, httpx
headers = {"content-type": "application/json"}
answer = httpx.post(sys.argv[1], content=sys.stdin.buffer.read(), headers=headers, timeout=60)
print(answer.status_code, answer.text)
"""


async def post_from_elsewhere(url: str, raw: bytes) -> tuple[int, dict[str, Any]]:
    """Status and body; sent by another process: writing 20 MB must not delay the probes of this one."""
    pipe = asyncio.subprocess.PIPE
    sender = await asyncio.create_subprocess_exec(sys.executable, "-c", SENDER, url, stdin=pipe, stdout=pipe)
    out, _ = await sender.communicate(raw)
    status, _, body = out.decode().partition(" ")
    return int(status), json.loads(body)


async def test_small_packets_are_sent_at_once(server: Server, http: httpx.AsyncClient) -> None:
    """Without TCP_NODELAY every other event would wait about 40 ms for an acknowledgement."""
    started = time.monotonic()
    text = (await http.post("/v1/chat/completions", json=chat("x", max_tokens=100, stream=True))).text
    read_chat(text)
    assert time.monotonic() - started < 100 * 0.02


async def test_broken_requests_leave_the_server_alive(server: Server, http: httpx.AsyncClient) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for data in (
        b"",
        b"nonsense\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(data)
        await writer.drain()
        writer.close()
    await answers(http)


async def test_engine_killed_five_times_in_mid_stream() -> None:
    """Open streams get the error event; the next request answers within 10 s."""
    with running(script=SCRIPT, step_seconds=0.005) as server:
        async with server.http() as http:
            for _ in range(5):
                opened = [asyncio.create_task(stream_until_it_ends(http, i)) for i in range(3)]
                await asyncio.sleep(0.3)
                os.kill(server.child(), signal.SIGKILL)
                for body in await asyncio.gather(*opened):
                    seen = read_chat(body)
                    assert seen.error is not None
                    assert seen.error["code"] == "service_unavailable"
                started = time.monotonic()
                await answers(http)
                assert time.monotonic() - started < 10
            os.kill(server.child(), signal.SIGKILL)
            deadline = time.monotonic() + 10
            while (await http.get("/health")).status_code != 503:
                assert time.monotonic() < deadline
            while (await http.get("/health")).status_code != 200:
                assert time.monotonic() < deadline


async def stream_until_it_ends(http: httpx.AsyncClient, number: int) -> str:
    body = chat(f"s{number}", max_tokens=400, stream=True)
    return (await http.post("/v1/chat/completions", json=body)).text


async def test_sigterm_drains() -> None:
    with running(script=SCRIPT, step_seconds=0.01) as server:
        async with server.http() as http:
            running_stream = asyncio.create_task(
                http.post("/v1/chat/completions", json=chat("x", max_tokens=100, stream=True))
            )
            await asyncio.sleep(0.3)
            server.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.1)
            refused = await http.post("/v1/chat/completions", json=chat("y"))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "service_unavailable")
            assert (await http.get("/health")).status_code == 503
            seen = read_chat((await running_stream).text)
            assert (seen.error, seen.finish[0]) == (None, "length")
        assert await asyncio.to_thread(server.process.wait, 10) == 0
        assert not os.path.exists(f"/proc/{server.engine_pid}")


async def test_drain_has_a_limit() -> None:
    with running(script=SCRIPT, step_seconds=0.05, drain_seconds=0.5) as server:
        async with server.http() as http:
            stream = asyncio.create_task(stream_until_it_ends(http, 1))
            await asyncio.sleep(0.3)
            server.process.send_signal(signal.SIGTERM)
            seen = read_chat(await stream)
            assert seen.error is not None
        assert await asyncio.to_thread(server.process.wait, 10) == 0


async def test_ctrl_c_twice_ends_at_once() -> None:
    with running(script=SCRIPT, step_seconds=0.05) as server:
        async with server.http() as http:
            stream = asyncio.create_task(stream_until_it_ends(http, 1))
            await asyncio.sleep(0.3)
            for _ in range(2):
                server.process.send_signal(signal.SIGINT)
                await asyncio.sleep(0.1)
            assert read_chat(await stream).error is not None
        assert await asyncio.to_thread(server.process.wait, 5) == 0


async def test_idle_server_uses_no_cpu(server: Server, http: httpx.AsyncClient) -> None:
    await until_empty(http)
    before = ticks(server.child())
    await asyncio.sleep(0.5)
    assert ticks(server.child()) - before <= 1


def ticks(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


async def test_no_growth_with_the_number_of_requests() -> None:
    """5000 different requests with log-probabilities, after a warm-up."""
    with running(script=SCRIPT) as server:
        async with server.http() as http:
            gate = asyncio.Semaphore(8)

            async def one(number: int) -> None:
                fields = {"max_tokens": 8, "logprobs": True, "top_logprobs": 5, "stream": number % 2 == 0}
                async with gate:
                    response = await http.post("/v1/chat/completions", json=chat(f"{number}" * 9, **fields))
                    assert response.status_code == 200

            async def many(first: int, count: int) -> dict[str, int]:
                await asyncio.gather(*(one(i) for i in range(first, first + count)))
                return {"server": memory(server.process.pid), "engine": memory(server.child())}

            warm = await many(0, 300)
            for first in range(300, 5300, 500):
                now = await many(first, 500)
                for name, before in warm.items():
                    assert now[name] - before < 20 << 20, (name, first)
            await until_empty(http)


async def test_port_in_use_is_one_line() -> None:
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"port {port}"):
            bind("127.0.0.1", port)


async def test_completions_over_http(http: httpx.AsyncClient) -> None:
    body = {"prompt": ["a", "b"], "max_tokens": 20, "temperature": 0, "stream": True}
    response = await http.post("/v1/completions", json=body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["transfer-encoding"] == "chunked"
    assert read_completion(response.text).text == {0: SCRIPT[:20], 1: SCRIPT[:20]}


async def test_more_connections_than_the_usual_limit_of_files() -> None:
    """1100 silent connections where 1024 files may be open: others are still answered."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))  # what the server inherits
    try:
        with running(script=SCRIPT) as server:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
            host, port = server.url.removeprefix("http://").split(":")
            opened = [await asyncio.open_connection(host, int(port)) for _ in range(1100)]
            async with server.http() as http:
                await answers(http)
            for _, writer in opened:
                writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_stopped_engine_does_not_hold_up_the_end() -> None:
    with running(script=SCRIPT, step_seconds=0.005) as server:
        async with server.http() as http:
            stream = asyncio.create_task(stream_until_it_ends(http, 1))
            await asyncio.sleep(0.3)
            os.kill(server.child(), signal.SIGSTOP)
            server.process.send_signal(signal.SIGTERM)
            assert read_chat(await stream).error is not None
        assert await asyncio.to_thread(server.process.wait, 20) == 0
