"""The engine process and its client, with the fake executor."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from serve_engine import CRASH, FACTORY
from serve_fakes import engine_client, request

from lmdeploy.engine.request import Request
from lmdeploy.errors import EngineDeadError, EngineError, ModelError
from lmdeploy.runtime import client as client_module
from lmdeploy.runtime.client import ProcessClient
from lmdeploy.runtime.messages import BEAT_SECONDS, Recipe
from lmdeploy.runtime.stream import Stream


async def tokens_of(client: ProcessClient, request: Request) -> list[int]:
    return [t async for event in await client.submit(request) for t in event.token_ids]


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true in time"
        await asyncio.sleep(0.01)


async def read_to_the_end(stream: Stream) -> int:
    """Number of events that still come."""
    return len([event async for event in stream])


async def test_streams_are_kept_apart() -> None:
    async with engine_client(script="abcdefgh") as engine:
        jobs = [tokens_of(engine, request(f"r{i}", f"prompt {i}", 1 + i % 8)) for i in range(40)]
        results = await asyncio.gather(*jobs)
    assert results == [list(b"abcdefgh"[: 1 + i % 8]) for i in range(40)]


async def test_one_stream_for_several_requests() -> None:
    async with engine_client(script="abcdefgh") as engine:
        stream = await engine.submit(request("a", "x", 3), request("b", "y", 5))
        seen = [(e.request_id, e.token_ids[0]) async for e in stream]
    assert sorted(seen) == [("a", t) for t in b"abc"] + [("b", t) for t in b"abcde"]


async def test_abort_frees_and_nothing_follows() -> None:
    async with engine_client(step_seconds=0.002) as engine:
        stream = await engine.submit(request("a", "x", 1000))
        await anext(stream)
        stream.abort()
        stats = await engine.stats()
        assert (stats["running"], stats["blocks_held"]) == (0, 0)
        assert await read_to_the_end(stream) <= 2


async def test_refused_request_raises_the_engines_error() -> None:
    async with engine_client(step_seconds=0.002) as engine:
        await engine.submit(request("a", "x", 500))
        with pytest.raises(EngineError, match="already in use"):
            await read_to_the_end(await engine.submit(request("a", "x", 1)))
        assert len(await tokens_of(engine, request("b", "y", 2))) == 2


async def test_factory_error_reaches_the_caller() -> None:
    with pytest.raises(ModelError, match="no such model"):
        await ProcessClient(Recipe.of(FACTORY, {"broken": 1})).start()


async def test_factory_that_cannot_be_imported() -> None:
    with pytest.raises(Exception, match="no_such_module"):
        await ProcessClient(Recipe.of("no_such_module:build", None)).start()


async def test_idle_worker_uses_no_cpu() -> None:
    async with engine_client() as engine:
        await tokens_of(engine, request("a", "x", 1))
        await asyncio.sleep(0.3)  # threads of the libraries settle
        before = cpu_ticks(engine.pid)
        await asyncio.sleep(0.5)
        assert cpu_ticks(engine.pid) - before <= 1


def cpu_ticks(pid: int | None) -> int:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


async def test_killed_five_times_in_mid_stream() -> None:
    async with engine_client(step_seconds=0.001, script="ab") as engine:
        for i in range(5):
            stream = await engine.submit(request(f"r{i}", "x", 1000))
            await anext(stream)
            os.kill(engine.pid or 0, signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                await read_to_the_end(stream)
            started = time.monotonic()
            assert await tokens_of(engine, request(f"after{i}", "x", 2)) == list(b"ab")
            assert time.monotonic() - started < 10
        assert engine.restarts == 5


async def test_crash_in_native_code_is_survived() -> None:
    async with engine_client(script="ab", crashes=True) as engine:
        with pytest.raises(EngineDeadError):
            await tokens_of(engine, request("a", chr(CRASH), 1))
        assert await tokens_of(engine, request("b", "x", 1)) == list(b"a")


async def test_drain_finishes_what_runs() -> None:
    async with engine_client(step_seconds=0.002) as engine:
        stream = await engine.submit(request("a", "x", 100))
        await anext(stream)
        draining = asyncio.create_task(engine.drain(10))
        await asyncio.sleep(0)
        with pytest.raises(EngineDeadError):
            await engine.submit(request("b", "x", 1))
        assert await read_to_the_end(stream) == 99
        assert await draining


async def test_drain_has_a_limit() -> None:
    async with engine_client(step_seconds=0.01) as engine:
        stream = await engine.submit(request("a", "x", 1000))
        await anext(stream)
        assert not await engine.drain(0.1)
        with pytest.raises(EngineDeadError):
            await read_to_the_end(stream)


async def test_long_step_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may last much longer than the signs of life that may be missing."""
    monkeypatch.setattr(client_module, "STALLED_BEATS", 2)
    monkeypatch.setattr(client_module, "LOST_BEATS", 3)
    async with engine_client(step_seconds=5 * BEAT_SECONDS, script="ab") as engine:
        assert await tokens_of(engine, request("a", "x", 1)) == list(b"a")
        assert (engine.ready, engine.restarts) == (True, 0)


async def test_step_without_end_is_noticed_and_replaced(caplog: pytest.LogCaptureFixture) -> None:
    """The process shows life all the while; it is the step that hangs."""
    engine = ProcessClient(Recipe.of(FACTORY, {"step_seconds": 600.0}), stalled_step=1.5)
    await engine.start()
    try:
        stream = await engine.submit(request("a", "x", 1))
        await until(lambda: not engine.ready, 6 * BEAT_SECONDS)
        assert engine.state == "stalled"
        assert engine.restarts == 0
        with pytest.raises(EngineDeadError, match="does not answer"):
            await engine.submit(request("b", "x", 1))
        with pytest.raises(EngineDeadError):
            await read_to_the_end(stream)
        await until(lambda: engine.ready, 10.0)
        assert engine.restarts == 1
    finally:
        await engine.close()
    assert "one step took more than" in caplog.text


async def test_slow_machine_has_more_patience() -> None:
    engine = ProcessClient(Recipe.of(FACTORY, {}), stalled_step=2.0)
    assert engine._patience == 2.0
    engine.info["longest_step"] = 3.0
    assert engine._patience == 30.0


async def test_stopped_process_is_noticed_and_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client_module, "STALLED_BEATS", 2)
    monkeypatch.setattr(client_module, "LOST_BEATS", 4)
    async with engine_client(step_seconds=0.001, script="ab") as engine:
        stream = await engine.submit(request("a", "x", 10_000))
        os.kill(engine.pid or 0, signal.SIGSTOP)
        await until(lambda: not engine.ready, 5 * BEAT_SECONDS)
        with pytest.raises(EngineDeadError, match="does not answer"):
            await engine.submit(request("b", "x", 1))
        with pytest.raises(EngineDeadError):
            await read_to_the_end(stream)
        assert await tokens_of(engine, request("c", "x", 2)) == list(b"ab")
        assert engine.restarts == 1
    assert "no sign of life for 4 s, ended by the server" in caplog.text
    assert "memory" not in caplog.text


async def test_stopped_process_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No restart either, and our own kill is not called a lack of memory."""
    monkeypatch.setattr(client_module, "STALLED_BEATS", 2)
    async with engine_client(step_seconds=0.001) as engine:
        await engine.submit(request("a", "x", 10_000))
        os.kill(engine.pid or 0, signal.SIGSTOP)
        started = time.monotonic()
        assert not await engine.drain(30)
        assert time.monotonic() - started < 5 * BEAT_SECONDS
        assert engine.restarts == 0
    assert caplog.text == ""


async def test_close_leaves_no_process() -> None:
    async with engine_client() as engine:
        pid = engine.pid
    assert not os.path.exists(f"/proc/{pid}")


def test_worker_dies_with_its_parent() -> None:
    code = f"""
import asyncio, sys
from lmdeploy.runtime.client import ProcessClient
from lmdeploy.runtime.messages import Recipe
from serve_engine import CRASH, FACTORY
from serve_fakes import engine_client, request
async def main():
    client = ProcessClient(Recipe.of({FACTORY!r}, {{}}))
    await client.start()
    print(client.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert os.path.exists(f"/proc/{pid}")
    parent.kill()
    parent.communicate()
    asyncio.run(until(lambda: not os.path.exists(f"/proc/{pid}")))


FOREIGN = "raise SystemExit('a file of the current folder was imported')"


@pytest.mark.parametrize("how", ["file", "-c"])
async def test_engine_process_imports_nothing_from_the_current_folder(tmp_path: Path, how: str) -> None:
    """Neither a source tree nor a file named like a library gets into the engine's process."""
    for name in ("numpy.py", "json.py", "select.py", "msgspec.py", "sitecustomize.py"):
        (tmp_path / name).write_text(FOREIGN)
    (tmp_path / "lmdeploy").mkdir()
    (tmp_path / "lmdeploy" / "__init__.py").write_text(FOREIGN)
    code = f"""
import sys
sys.path[:] = [p for p in sys.path if p]
import asyncio
from lmdeploy.runtime.client import ProcessClient
from lmdeploy.runtime.messages import Recipe
async def main():
    client = ProcessClient(Recipe.of({FACTORY!r}, {{}}))
    await client.start()
    await client.close()
    print("well")
sys.path[:0] = [""] * {how == "-c"}
asyncio.run(main())
"""
    script = tmp_path / "inner" / "main.py"
    script.parent.mkdir()
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, *(["-c", code] if how == "-c" else [str(script)])]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=60)
    assert done.stdout == "well\n", done.stderr


async def test_requests_that_meet_the_end_of_the_engine_are_told() -> None:
    """One is submitted at every turn of the event loop around the end: an error or an answer, no silence."""
    async with engine_client(script="ab") as engine:
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        tasks = []
        while engine._ready.is_set():
            tasks.append(asyncio.create_task(tokens_of(engine, request(f"r{len(tasks)}", "x", 2))))
            await asyncio.sleep(0)
        for told in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20):
            assert told == list(b"ab") or isinstance(told, EngineDeadError)
