"""Sleeping: the memory of the engine goes back, requests are told so, and waking brings all of it again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import serve_process
from serve_fakes import ANSWER, TEXT, Api, api
from serve_wire import error_of

from lmdeploy.serve.served import ServerOptions

pytestmark = pytest.mark.asyncio(loop_scope="module")
OPTIONS = ServerOptions(sleep_mode=True)


async def post(server: Api, path: str, **query: Any) -> Any:
    return await server.http.post(path, params=query)


async def test_sleep_and_wake() -> None:
    async with api(TEXT, options=OPTIONS) as server:
        pid = server.served.client.pid
        for level in (1, 2):
            assert (await post(server, "/sleep", level=level)).json() == {"is_sleeping": True}
            assert not Path(f"/proc/{pid}").exists(), "the engine process, and so its memory, is gone"
            assert (await server.http.get("/is_sleeping")).json() == {"is_sleeping": True}
            assert (await server.http.get("/health")).json() == {"status": "sleeping"}
            error = error_of(await server.chat(), 503, "server_error")
            assert "/wakeup" in error["message"]
            assert (await server.http.post("/tokenize", json={"prompt": "a"})).status_code == 200
            assert (await server.http.get("/v1/models")).status_code == 200
            assert (await post(server, "/sleep")).json() == {"is_sleeping": True}
            assert (await post(server, "/wakeup")).json() == {"is_sleeping": False}
            pid = server.served.client.pid
            assert (await server.chat()).json()["choices"][0]["message"]["content"] == ANSWER
            assert (await server.http.get("/health")).json() == {"status": "ok"}


async def test_woken_by_parts() -> None:
    async with api(TEXT, options=OPTIONS) as server:
        await post(server, "/sleep")
        assert (await post(server, "/wakeup", tags="weights")).json() == {"is_sleeping": True}
        error_of(await server.chat(), 503, "server_error")
        assert (await post(server, "/wakeup", tags="kv_cache")).json() == {"is_sleeping": False}
        assert (await server.chat()).status_code == 200
        assert (await post(server, "/wakeup")).json() == {"is_sleeping": False}


async def test_running_requests_are_told() -> None:
    async with api("", options=OPTIONS, step_seconds=0.01) as server:
        fields = {"max_tokens": 400, "ignore_eos": True, "temperature": 0}
        whole = asyncio.ensure_future(server.chat(**fields))
        stream = asyncio.ensure_future(server.chat(**fields, stream=True))
        while (await server.served.client.stats())["running"] < 2:
            await asyncio.sleep(0.01)
        await post(server, "/sleep")
        error_of(await whole, 503, "server_error")
        assert '"code":"service_unavailable"' in (await stream).text


async def test_wrong_and_forbidden() -> None:
    async with api(TEXT, options=OPTIONS) as server:
        assert error_of(await post(server, "/sleep", level=3))["param"] == "level"
        assert error_of(await post(server, "/wakeup", tags="all"))["param"] == "tags"
        error_of(await post(server, "/sleep", model="other"), 404)
        assert (await server.http.get("/is_sleeping")).json() == {"is_sleeping": False}
        closed = server.configure()
        for path in ("/sleep", "/wakeup"):
            error_of(await post(closed, path))


async def test_sleeping_servers_end_and_wake_after_each_other() -> None:
    """Many callers at once change nothing twice; a server that sleeps can be ended."""
    async with api(TEXT, options=OPTIONS) as server:
        for path in ("/sleep", "/wakeup", "/sleep"):
            answers = await asyncio.gather(*(post(server, path) for _ in range(5)))
            assert {answer.status_code for answer in answers} == {200}
    with serve_process.running(options={"sleep_mode": True}) as process:
        async with process.http() as http:
            assert (await http.post("/sleep")).status_code == 200
        process.process.terminate()
        assert process.process.wait(20) == 0
