"""The engine in its own process, seen from an event loop.

Owns the process: starts it, talks to it, hands what each step produced to the streams that wait, starts it
again after a crash. Knows requests and token events; no text and no HTTP. One object belongs to one event
loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lmdeploy
from lmdeploy.engine.request import Request, TokenEvent
from lmdeploy.errors import EngineDeadError, LMDeployError, rebuild_error
from lmdeploy.runtime.messages import (
    Abort,
    Add,
    Close,
    Drain,
    Failed,
    Frames,
    GetStats,
    Message,
    Ready,
    Recipe,
    Rejected,
    Report,
    Stats,
    Step,
    pack,
    report_decoder,
)

logger = logging.getLogger("lmdeploy.engine")

READY_TIMEOUT = 10.0  # seconds a new request waits for an engine that is being started again
MAX_FAILED_STARTS = 5  # in a row; then requests fail at once
_BACKOFF = (0.0, 0.1, 0.3, 0.6, 1.0)  # seconds before a restart, by the number of recent deaths
_RECENT = 30.0  # seconds after which a death no longer counts
_EXIT_TIMEOUT = 5.0


class Stream:
    """Events of one or more requests as they come. Ends when all have finished.

    Iterating raises the error that the engine refused a request with, and EngineDeadError when the engine
    process died. A reader that is slow finds several events waiting; `take` returns them all.
    """

    def __init__(self, client: ProcessClient, request_ids: Iterable[str]) -> None:
        self._client = client
        self._open = set(request_ids)
        self._failed = False
        self._pending: deque[TokenEvent | LMDeployError] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def push(self, item: TokenEvent | LMDeployError) -> None:
        """Called by the client: an event or the error that ends the stream."""
        if self._failed:
            return
        self._pending.append(item)
        if isinstance(item, LMDeployError):
            self._failed = True
        elif item.finish_reason is not None:
            self._open.discard(item.request_id)
        if self._waiter is not None:
            _wake(self._waiter)

    @property
    def ended(self) -> bool:
        return not self._pending and (self._failed or not self._open)

    async def wait(self, timeout: float | None = None) -> bool:
        """True when events are there or the stream has ended, False when `timeout` seconds passed without."""
        if not self._pending and not self.ended:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = None if timeout is None else loop.call_later(timeout, _wake, self._waiter)
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        return bool(self._pending) or self.ended

    def take(self) -> list[TokenEvent]:
        """The events that are there, in order, without waiting."""
        events: list[TokenEvent] = []
        while self._pending:
            item = self._pending[0]
            if isinstance(item, LMDeployError):
                if events:
                    break
                self._pending.popleft()
                raise item
            self._pending.popleft()
            events.append(item)
        return events

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> TokenEvent:
        await self.wait()
        if self.ended:
            raise StopAsyncIteration
        item = self._pending.popleft()
        if isinstance(item, LMDeployError):
            raise item
        return item

    def abort(self, request_id: str | None = None) -> None:
        """Stop one request, or all that still run; nothing more is delivered for it."""
        ids = self._open & {request_id} if request_id is not None else set(self._open)
        self._open -= ids
        self._client.abort(ids)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class _Link(asyncio.Protocol):
    """The socket to one engine process."""

    def __init__(self, client: ProcessClient) -> None:
        self._client = client
        self._frames = Frames()
        self.started: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        for frame in self._frames.feed(data):
            self._dispatch(report_decoder.decode(frame))

    def _dispatch(self, report: Report) -> None:
        if isinstance(report, Step):
            self._client.deliver(report.events)
        elif isinstance(report, Rejected):
            error = rebuild_error(report.kind, report.message, report.param)
            self._client.fail([report.request_id], error)
        elif isinstance(report, Stats):
            self._client.answer_stats(report.values)
        elif isinstance(report, Ready):
            self.started.set_result(report)
        elif isinstance(report, Failed):
            self.started.set_exception(rebuild_error(report.kind, report.message))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.started.done():
            self.started.set_exception(EngineDeadError("the engine process ended while it was starting"))
        if not self.closed.done():
            self.closed.set_result(None)

    def send(self, message: Message) -> None:
        self.transport.write(pack(message))


class ProcessClient:
    """An engine process that is kept alive."""

    def __init__(self, recipe: Recipe, *, ready_timeout: float = READY_TIMEOUT) -> None:
        self._recipe = recipe
        self._ready_timeout = ready_timeout
        self._streams: dict[str, Stream] = {}
        self._stats_waiters: deque[asyncio.Future[dict[str, Any]]] = deque()
        self._ready = asyncio.Event()
        self._link: _Link | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._closing = False
        self._gave_up = False
        self.info: dict[str, Any] = {}
        self.restarts = 0

    @property
    def ready(self) -> bool:
        """The engine can take requests now."""
        return self._ready.is_set() and not self._closing

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the process and wait until it can take requests. Raises what the factory raised."""
        await self._launch()
        self._supervisor = asyncio.get_running_loop().create_task(self._supervise())

    async def submit(self, *requests: Request) -> Stream:
        """Start requests whose events come in one stream.

        Waits for an engine that is being started again, at most `ready_timeout` seconds.
        Raises EngineDeadError.
        """
        await self._wait_ready()
        stream = Stream(self, [r.request_id for r in requests])
        for request in requests:
            self._streams[request.request_id] = stream
            self._send(Add(request))
        return stream

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget these requests and tell the engine to free what they hold. Unknown ids are ignored."""
        known = tuple(i for i in request_ids if self._streams.pop(i, None) is not None)
        if known and self._ready.is_set():
            self._send(Abort(known))

    async def stats(self) -> dict[str, Any]:
        """The engine's StepStats as a dictionary. Raises EngineDeadError."""
        await self._wait_ready()
        waiter: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._stats_waiters.append(waiter)
        self._send(GetStats())
        return await waiter

    async def drain(self, timeout: float) -> bool:
        """Take no more requests and let the running ones finish; then the process is gone.

        Returns False when some were cut off because `timeout` seconds had passed.
        """
        await self._let_go()
        finished = True
        if self._link is not None and self._ready.is_set():
            self._send(Drain())
            _, late = await asyncio.wait([self._link.closed], timeout=timeout)
            finished = not late
        await self.close()
        return finished

    async def close(self) -> None:
        """End the process; open streams get EngineDeadError."""
        await self._let_go()
        if self._link is not None and not self._link.closed.done():
            self._send(Close())
        await self._reap(_EXIT_TIMEOUT)
        self._lost("the server is shutting down")

    async def _let_go(self) -> None:
        """From now on nothing is taken, and a process that ends is not started again."""
        self._closing = True
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor

    # Called by the link.

    def deliver(self, events: list[TokenEvent]) -> None:
        """Everything one step produced, for all streams."""
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue
            if event.finish_reason is not None:
                del self._streams[event.request_id]
            stream.push(event)

    def fail(self, request_ids: Iterable[str], error: LMDeployError) -> None:
        """End the streams of these requests with `error`."""
        for stream in {s for i in request_ids if (s := self._streams.pop(i, None)) is not None}:
            stream.push(error)

    def answer_stats(self, values: dict[str, Any]) -> None:
        """Answers come in the order of the questions."""
        waiter = self._stats_waiters.popleft()
        if not waiter.done():
            waiter.set_result(values)

    # The life of the process.

    def _send(self, message: Message) -> None:
        if self._link is not None and not self._link.transport.is_closing():
            self._link.send(message)

    async def _wait_ready(self) -> None:
        if self._closing:
            raise EngineDeadError("the server is shutting down")
        if self._gave_up:
            raise EngineDeadError(
                "the engine has failed and could not be started again; see the server's log"
            )
        try:
            await asyncio.wait_for(self._ready.wait(), self._ready_timeout)
        except asyncio.TimeoutError:
            raise EngineDeadError("the engine is not ready yet; try again later") from None

    async def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = _spawn(theirs)
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        _, link = await loop.create_unix_connection(lambda: _Link(self), sock=ours)
        self._link = link
        link.send(self._recipe)
        try:
            self.info = (await link.started).info
        except EngineDeadError as error:
            raise EngineDeadError(f"{error} ({_how(await self._reap(1.0))})") from None
        except BaseException:
            link.transport.close()
            await self._reap(0.0)
            raise
        self._ready.set()

    async def _supervise(self) -> None:
        loop = asyncio.get_running_loop()
        deaths: deque[float] = deque(maxlen=len(_BACKOFF))
        failed = 0
        while not self._gave_up:
            if self._link is not None and self._ready.is_set():
                await asyncio.wait([self._link.closed])  # cancelling this must not cancel the future
                how = _how(await self._reap(_EXIT_TIMEOUT))
                self._lost("the engine process has died")
                logger.error("the engine process died (%s); starting it again", how)
                deaths.append(loop.time())
            recent = sum(t > loop.time() - _RECENT for t in deaths) + failed
            await asyncio.sleep(_BACKOFF[min(recent, len(_BACKOFF)) - 1])
            try:
                await self._launch()
                failed = 0
                self.restarts += 1
            except LMDeployError as error:
                failed += 1
                logger.error("the engine could not be started: %s", error)
                self._gave_up = failed >= MAX_FAILED_STARTS

    def _lost(self, why: str) -> None:
        """The process is gone: nothing of it may be waited for any longer."""
        self._ready.clear()
        self.fail(list(self._streams), EngineDeadError(why))
        while self._stats_waiters:
            waiter = self._stats_waiters.popleft()
            if not waiter.done():
                waiter.set_exception(EngineDeadError(why))

    async def _reap(self, patience: float) -> int | None:
        """Wait `patience` seconds for the process to end, then kill it; returns its exit code."""
        process = self._process
        if process is None:
            return None
        deadline = asyncio.get_running_loop().time() + patience
        while process.poll() is None and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        if process.poll() is None:
            process.kill()
            await asyncio.to_thread(process.wait)
        return process.returncode


def _how(code: int | None) -> str:
    """What an exit code says about the end of a process."""
    if code is None or code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"{name}, which the system sends when memory runs out" if name == "SIGKILL" else name


# Sets the parent's import path before anything is imported: `-m` and `-c` put the current folder first, where
# a file named like a library, or a source tree without a built extension, would be imported in its place.
_BOOTSTRAP = (
    "import sys; sys.path[:] = sys.argv[2:]; del sys.argv[2:]; "
    "from lmdeploy.runtime.worker import main; sys.exit(main(sys.argv))"
)


def _import_path() -> list[str]:
    """Where this process imports from, as absolute folders and without the current one."""
    paths = [os.path.abspath(path) for path in sys.path if path]
    home = str(Path(lmdeploy.__file__).resolve().parent.parent)
    known = {os.path.realpath(path) for path in paths}
    # A package that was found through the current folder, or by an import hook, is still the one to run.
    return paths if home in known else [home, *paths]


def _spawn(theirs: socket.socket) -> subprocess.Popen[bytes]:
    """A fresh interpreter (never a fork) that inherits one end of the socket and the import path."""
    return subprocess.Popen(
        [sys.executable, "-c", _BOOTSTRAP, str(theirs.fileno()), *_import_path()],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
    )
