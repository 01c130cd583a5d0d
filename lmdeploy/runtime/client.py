"""The engine in its own process, seen from an event loop.

Owns the process: starts it, talks to it, hands what each step produced to the streams that wait, starts it
again after a crash. Knows requests and token events; no text and no HTTP. One object belongs to one event
loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import subprocess
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

from lmdeploy.engine.request import Request
from lmdeploy.errors import EngineDeadError, LMDeployError, rebuild_error
from lmdeploy.runtime.messages import (
    BEAT_SECONDS,
    Abort,
    Add,
    Beat,
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
from lmdeploy.runtime.process import ending, spawn
from lmdeploy.runtime.stream import Stream

logger = logging.getLogger("lmdeploy.engine")

READY_TIMEOUT = 10.0  # seconds a new request waits for an engine that is being started again
MAX_FAILED_STARTS = 5  # in a row; then requests fail at once
_BACKOFF = (0.0, 0.1, 0.3, 0.6, 1.0)  # seconds before a restart, by the number of recent deaths
_RECENT = 30.0  # seconds after which a death no longer counts
_EXIT_TIMEOUT = 5.0
# Signs of life that may be missing in a row: then the engine counts as stalled, and then it is ended.
STALLED_BEATS = 10
LOST_BEATS = 30
# Seconds one step may take before the engine counts as stalled, and by how much more before it is ended.
STALLED_STEP = 120.0
LOST_STEPS = 3.0
SLOW_STEPS = 10.0  # the same in steps as long as the engine expects its longest to be, where that is more


class Observer(Protocol):
    """Hears what a client submits, gets and gives up; called on the event loop."""

    def submitted(self, requests: Iterable[Request]) -> None:
        """These went to the engine."""

    def stepped(self, step: Step) -> None:
        """The engine has made a step."""

    def ended(self, request_ids: Iterable[str], error: LMDeployError | None, complete: bool = False) -> None:
        """No event comes for these any more: they failed, their answer is complete, or nobody wants it."""


class _Link(asyncio.Protocol):
    """The socket to one engine process."""

    def __init__(self, client: ProcessClient) -> None:
        self._client = client
        self._frames = Frames()
        self._heard = False
        self.missed = 0  # signs of life in a row
        self.step_seconds = 0.0  # that the step has taken which the engine is in
        self.started: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._heard = True
        for frame in self._frames.feed(data):
            self._dispatch(report_decoder.decode(frame))

    def _dispatch(self, report: Report) -> None:
        if isinstance(report, Step):
            self.step_seconds = 0.0
            self._client.deliver(report)
        elif isinstance(report, Beat):
            self.step_seconds = report.step_seconds
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

    async def beat(self) -> bool:
        """Wait as long as a sign of life takes; True when the process has gone instead.

        Missing ones are counted, not seconds: a pause of this process, whose clock runs on, is one of them.
        """
        # Cancelling this must not cancel the future.
        gone, _ = await asyncio.wait([self.closed], timeout=BEAT_SECONDS)
        self.missed = 0 if self._heard else self.missed + 1
        self._heard = False
        return bool(gone)

    def send(self, message: Message) -> None:
        self.transport.write(pack(message))


class ProcessClient:
    """An engine process that is kept alive."""

    def __init__(
        self, recipe: Recipe, *, ready_timeout: float = READY_TIMEOUT, stalled_step: float = STALLED_STEP
    ) -> None:
        self._recipe = recipe
        self._ready_timeout = ready_timeout
        self._stalled_step = stalled_step
        self._streams: dict[str, Stream] = {}
        self._stats_waiters: deque[asyncio.Future[dict[str, Any]]] = deque()
        self._ready = asyncio.Event()
        self._link: _Link | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._closing = False
        self._gave_up = False
        self._bedside = asyncio.Lock()  # one change between asleep and awake at a time
        self.asleep = False
        self.info: dict[str, Any] = {}
        self.restarts = 0
        self.waiting = 0  # requests that wait for the engine to be ready
        self.last_stats: dict[str, Any] = {}  # what the engine said when it was asked last
        self.observer: Observer | None = None

    @property
    def ready(self) -> bool:
        """The engine can take requests now."""
        return self._ready.is_set() and not self._closing and not self._stalled

    @property
    def _stalled(self) -> bool:
        """The process is there and gives no sign of life, or does not get on."""
        if self._link is None or not self._ready.is_set():
            return False
        return self._link.missed >= STALLED_BEATS or self._link.step_seconds >= self._patience

    @property
    def _patience(self) -> float:
        return max(self._stalled_step, SLOW_STEPS * float(self.info.get("longest_step", 0.0)))

    @property
    def state(self) -> str:
        """ "ready", "starting", "stalled", "failed" or "asleep"."""
        if self.asleep:
            return "asleep"
        if self._gave_up:
            return "failed"
        if self._stalled:
            return "stalled"
        return "ready" if self._ready.is_set() else "starting"

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
        self.waiting += len(requests)
        try:
            await self._wait_ready()
        finally:
            self.waiting -= len(requests)
        stream = Stream(self.abort, [r.request_id for r in requests])
        for request in requests:
            self._streams[request.request_id] = stream
            self._send(Add(request))
        if self.observer is not None:
            self.observer.submitted(requests)
        return stream

    def abort(self, request_ids: Iterable[str], complete: bool = False) -> None:
        """Forget these requests and tell the engine to free what they hold. Unknown ids are ignored.

        complete: their answers are, so this is no failure of anybody's.
        """
        known = tuple(i for i in request_ids if self._streams.pop(i, None) is not None)
        if known and self.observer is not None:
            self.observer.ended(known, None, complete)
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
            finished = await self._gone_within(self._link, timeout)
        await self.close()
        return finished

    async def close(self) -> None:
        """End the process; open streams get EngineDeadError."""
        await self._let_go()
        if self._link is not None and not self._link.closed.done():
            self._send(Close())
        await self._reap(0.0 if self._stalled else _EXIT_TIMEOUT)
        self._lost("the server is shutting down")

    async def _gone_within(self, link: _Link, timeout: float) -> bool:
        """False when the process is still there after `timeout` seconds, or as soon as it is stalled."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while not self._stalled and loop.time() < deadline:
            with contextlib.suppress(asyncio.TimeoutError):
                if await asyncio.wait_for(link.beat(), deadline - loop.time()):
                    return True
        return False

    async def sleep(self) -> None:
        """End the process, and with it all memory of weights and cache, until `wake`.

        Requests get EngineDeadError, those that run and those that come.
        """
        async with self._bedside:
            if self.asleep or self._closing:
                return
            self.asleep = True
            self.fail(list(self._streams), EngineDeadError("the model was put to sleep"))
            await self._dismiss_supervisor()
            if self._link is not None and not self._link.closed.done():
                self._send(Close())
            await self._reap(_EXIT_TIMEOUT)
            self._lost("the model was put to sleep")

    async def wake(self) -> None:
        """Start the process again and wait until it can take requests; it sleeps on when that fails."""
        async with self._bedside:
            if self.asleep and not self._closing:
                await self.start()
                self.asleep = False

    async def _let_go(self) -> None:
        """From now on nothing is taken, and a process that ends is not started again."""
        self._closing = True
        await self._dismiss_supervisor()

    async def _dismiss_supervisor(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor

    # Called by the link.

    def deliver(self, step: Step) -> None:
        """Everything one step produced, for all streams."""
        if self.observer is not None:
            self.observer.stepped(step)
        for event in step.events:
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue
            if event.finish_reason is not None:
                del self._streams[event.request_id]
            stream.push(event)

    def fail(self, request_ids: Iterable[str], error: LMDeployError) -> None:
        """End the streams of these requests with `error`."""
        request_ids = list(request_ids)
        if request_ids and self.observer is not None:
            self.observer.ended(request_ids, error)
        for stream in {s for i in request_ids if (s := self._streams.pop(i, None)) is not None}:
            stream.push(error)

    def answer_stats(self, values: dict[str, Any]) -> None:
        """Answers come in the order of the questions."""
        self.last_stats = values
        waiter = self._stats_waiters.popleft()
        if not waiter.done():
            waiter.set_result(values)

    # The life of the process.

    def _send(self, message: Message) -> None:
        if self._link is not None and not self._link.transport.is_closing():
            self._link.send(message)

    async def _wait_ready(self) -> None:
        """The engine is ready when this returns: nothing else has run since it was found so."""
        deadline = asyncio.get_running_loop().time() + self._ready_timeout
        while True:
            if self._closing:
                raise EngineDeadError("the server is shutting down")
            if self.asleep:
                raise EngineDeadError("the model sleeps; POST /wakeup wakes it")
            if self._gave_up:
                raise EngineDeadError(
                    "the engine has failed and could not be started again; see the server's log"
                )
            if self._stalled:
                raise EngineDeadError("the engine does not answer; try again later")
            if self._ready.is_set():
                return
            try:
                left = deadline - asyncio.get_running_loop().time()
                await asyncio.wait_for(self._ready.wait(), left)
            except asyncio.TimeoutError:
                raise EngineDeadError("the engine is not ready yet; try again later") from None

    async def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = spawn(theirs)
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        _, link = await loop.create_unix_connection(lambda: _Link(self), sock=ours)
        self._link = link
        link.send(self._recipe)
        try:
            self.info = (await link.started).info
        except EngineDeadError as error:
            raise EngineDeadError(f"{error} ({await self._reap(1.0)})") from None
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
                how = await self._end_of(self._link)
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

    async def _end_of(self, link: _Link) -> str:
        """Wait for the end of the process, which is made when it is lost; returns how it ended."""
        while not await link.beat():
            if link.missed == STALLED_BEATS:
                logger.error("the engine has given no sign of life for %g s", STALLED_BEATS * BEAT_SECONDS)
            if link.missed >= LOST_BEATS or link.step_seconds >= LOST_STEPS * self._patience:
                await self._reap(0.0)
                link.transport.close()
                if link.missed < LOST_BEATS:
                    return f"one step took more than {link.step_seconds:.0f} s, ended by the server"
                return f"no sign of life for {LOST_BEATS * BEAT_SECONDS:g} s, ended by the server"
        return await self._reap(_EXIT_TIMEOUT)

    def _lost(self, why: str) -> None:
        """The process is gone: nothing of it may be waited for any longer."""
        self._ready.clear()
        self.fail(list(self._streams), EngineDeadError(why))
        while self._stats_waiters:
            waiter = self._stats_waiters.popleft()
            if not waiter.done():
                waiter.set_exception(EngineDeadError(why))

    async def _reap(self, patience: float) -> str:
        """Wait `patience` seconds for the process to end, then kill it; returns how it ended."""
        process = self._process
        if process is None:
            return "not started"
        deadline = asyncio.get_running_loop().time() + patience
        while process.poll() is None and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        if process.poll() is None:
            process.kill()
            await asyncio.to_thread(process.wait)
            return "ended by the server"
        return ending(process.returncode)
