"""The proxy as a process before real servers, which register, die, stop and drain while requests run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import openai
import pytest
from proxy_process import ProxyProcess, proxy_process
from serve_process import Server, chat
from serve_wire import error_of, read_chat

SCRIPT = "One, two, three, four."
REQUESTS = 12


@contextmanager
def servers(proxy: ProxyProcess, count: int, **settings: Any) -> Iterator[list[Server]]:
    found = [Server(script=SCRIPT, proxy_url=proxy.url, **settings) for _ in range(count)]
    try:
        yield found
    finally:
        for server in found:
            server.process.send_signal(signal.SIGCONT)
            server.end()


async def nodes(http: httpx.AsyncClient) -> dict[str, Any]:
    found: dict[str, Any] = (await http.get("/nodes/status")).json()
    return found


async def until(http: httpx.AsyncClient, **counts: int) -> None:
    """Waits until so many nodes are in each state."""
    wanted = {name.replace("_", " "): count for name, count in counts.items()}
    deadline = time.monotonic() + 15
    while (seen := (await http.get("/health")).json()["nodes"]) != wanted:
        assert time.monotonic() < deadline, seen
        await asyncio.sleep(0.05)


@asynccontextmanager
async def fleet(count: int = 3, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, list[Server]]]:
    """A proxy and servers that have registered at it."""
    flags = ("--health-interval", "0.3", "--routing-strategy", "min_expected_latency")
    with proxy_process(*flags) as proxy, servers(proxy, count, **settings) as found:
        async with proxy.http() as http:
            await until(http, ready=count)
            yield http, found


async def ask(http: httpx.AsyncClient, number: int, **fields: Any) -> str:
    """The text of an answer, by a stream for odd numbers; anything but a whole answer fails."""
    body = chat(f"question {number}", **fields)
    if number % 2:
        response = await http.post("/v1/chat/completions", json={**body, "stream": True})
        seen = read_chat(response.text)
        assert seen.error is None
        assert seen.finish == {0: "length"}
        return seen.text[0]
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP], ids=lambda s: s.name)
async def test_no_request_is_lost_with_a_server(end: signal.Signals) -> None:
    """One of three is killed, drained or stopped before the first token of what it holds."""
    async with fleet(step_seconds=0.4) as (http, found):  # a prompt takes two steps
        expected = [await ask(http, number, max_tokens=4) for number in (0, 1)]
        tasks = [asyncio.create_task(ask(http, number % 2, max_tokens=4)) for number in range(REQUESTS)]
        while sum(held := [node["unfinished"] for node in (await nodes(http)).values()]) < REQUESTS:
            await asyncio.sleep(0.01)
        assert held == [REQUESTS / 3] * 3
        os.kill(found[0].process.pid, end)
        late = [asyncio.create_task(ask(http, number % 2, max_tokens=4)) for number in range(REQUESTS)]
        assert await asyncio.gather(*tasks, *late) == expected * REQUESTS


async def test_streams_that_have_begun_end_with_an_error_and_the_rest_go_on() -> None:
    async with fleet(step_seconds=0.05) as (http, found):
        body = chat("x", max_tokens=60, stream=True)
        tasks = [asyncio.create_task(http.post("/v1/chat/completions", json=body)) for _ in range(12)]
        await asyncio.sleep(1.5)
        os.kill(found[1].process.pid, signal.SIGKILL)
        seen = [read_chat((await task).text) for task in tasks]
        broken = [one for one in seen if one.error is not None]
        assert len(broken) == 4
        assert all(one.text[0] and one.error["code"] == "service_unavailable" for one in broken if one.error)
        await until(http, ready=2, down=1)


async def test_servers_come_back() -> None:
    """A stopped one that goes on is used again; a proxy that is started again knows its servers soon."""
    async with fleet(2, step_seconds=0.01) as (http, found):
        found[0].process.send_signal(signal.SIGSTOP)
        found[0].process.send_signal(signal.SIGCONT)
        await until(http, ready=2)
        os.kill(found[0].child(), signal.SIGKILL)  # its engine, which it starts again
        assert (await asyncio.gather(*(ask(http, n) for n in range(4))))[0].startswith(SCRIPT)
        await until(http, ready=2)
        await http.post("/nodes/remove", json={"url": found[0].url})
        await asyncio.sleep(1.2)  # it has said twice that it is still there
        assert set(await nodes(http)) == {found[1].url}
        await http.post("/nodes/add", json={"url": found[0].url})
        await until(http, ready=2)


async def test_a_client_that_leaves_frees_the_engine() -> None:
    async with fleet(1, step_seconds=0.02) as (http, (server,)):
        for stream in (True, False):
            body = chat("x", max_tokens=400, stream=stream)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(http.post("/v1/chat/completions", json=body), 0.3)
            await asyncio.sleep(0.3)
            async with server.http() as direct:
                stats = (await direct.get("/stats")).json()
            assert (stats["running"], stats["waiting"], stats["blocks_held"]) == (0, 0, 0)


async def test_the_official_client_through_the_proxy() -> None:
    async with fleet(2) as (http, _):
        client = openai.AsyncOpenAI(
            api_key="x", base_url=f"{str(http.base_url).rstrip(chr(47))}/v1", max_retries=0
        )
        assert [model.id async for model in client.models.list()] == ["byte-model"]
        stream = await client.completions.create(model="byte-model", prompt="a", max_tokens=9, stream=True)
        assert "".join([c.choices[0].text async for c in stream]) == SCRIPT[:9]
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.completions.create(model="other", prompt="a")
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.completions.create(model="byte-model", prompt="a", temperature=9)


async def test_the_proxy_finishes_what_runs_and_ends_with_0() -> None:
    with proxy_process("--health-interval", "0.3") as proxy, servers(proxy, 1, step_seconds=0.02):
        async with proxy.http() as http:
            await until(http, ready=1)
            task = asyncio.create_task(ask(http, 1, max_tokens=60))
            await asyncio.sleep(0.3)
            proxy.process.terminate()
            await asyncio.sleep(0.2)
            error_of(await http.post("/v1/chat/completions", json=chat("x")), 503, "server_error")
            assert (await task).startswith(SCRIPT)
        assert await asyncio.to_thread(proxy.process.wait, 10) == 0


async def test_two_requests_with_the_same_beginning_meet() -> None:
    """The second turn of each talk goes where the first one was, and its prompt is found in the cache."""
    with proxy_process() as proxy, servers(proxy, 3, session_len=4096):
        async with proxy.http() as http:
            await until(http, ready=3)
            for talk in range(6):
                first = {"role": "user", "content": f"{talk} " + "word " * 200}
                body = {"messages": [first], "max_tokens": 4, "temperature": 0}
                answer = (await http.post("/v1/chat/completions", json=body)).json()
                turns = [first, answer["choices"][0]["message"], {"role": "user", "content": "more"}]
                turns[1] = {"role": "assistant", "content": turns[1]["content"]}
                again = await http.post("/v1/chat/completions", json={**body, "messages": turns})
                usage = again.json()["usage"]
                assert usage["prompt_tokens_details"]["cached_tokens"] > 900, json.dumps(usage)
