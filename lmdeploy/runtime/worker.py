"""Main of the engine process, which `runtime.client` starts with the number of its socket.

Owns the loop around one engine: read commands, step while there is work, send what a step produced as one
message. It sleeps in select when there is nothing to do. It ends when told to, when the socket to its parent
closes, and when its parent dies. Knows no event loop, no HTTP and no text.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lmdeploy.errors import EngineDeadError, LMDeployError, error_kind
from lmdeploy.runtime.messages import (
    BEAT_SECONDS,
    Abort,
    Add,
    Beat,
    Close,
    Command,
    Drain,
    Failed,
    Frames,
    GetStats,
    Message,
    Ready,
    Recipe,
    Rejected,
    Stats,
    Step,
    command_decoder,
    pack,
)

_PR_SET_PDEATHSIG = 1
_READ_BYTES = 1 << 18
_READS = 64  # between two steps: an abort must not wait behind other people's long prompts


class ParentGoneError(Exception):
    """The other end of the socket is closed."""


class Channel:
    """Blocking, framed view of the socket to the parent."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._frames = Frames()
        self._turn = threading.Lock()

    def send(self, message: Message) -> None:
        """May be called from several threads."""
        try:
            with self._turn:
                self._sock.sendall(pack(message))
        except (BrokenPipeError, ConnectionResetError):
            raise ParentGoneError from None

    def receive(self, timeout: float | None) -> list[Command]:
        """All complete commands that are there; waits for bytes first, `timeout` seconds or for ever."""
        commands: list[Command] = []
        for _ in range(_READS):
            if not select.select([self._sock], [], [], timeout)[0]:
                break
            commands += [command_decoder.decode(frame) for frame in self._frames.feed(self._read())]
            timeout = 0.0
        return commands

    def _read(self) -> bytes:
        try:
            data = self._sock.recv(_READ_BYTES)
        except ConnectionResetError:
            data = b""
        if not data:
            raise ParentGoneError
        return data


@dataclass(slots=True)
class Ledger:
    """Where the time of this process went, in seconds.

    compute: in steps. idle: waiting for work. bound: `compute` by what kept others waiting meanwhile.
    """

    compute: float = 0.0
    idle: float = 0.0
    bound: dict[str, float] = field(default_factory=dict)


class Pulse:
    """Shows that the process lives, from a thread of its own, and for how long the step has been running.

    Holds nothing of the engine, which must be free to go at the end.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.step_began = 0.0  # 0: in no step

    def run(self) -> None:
        """For ever: a long step must not look like a process that hangs."""
        with contextlib.suppress(ParentGoneError):
            while True:
                time.sleep(BEAT_SECONDS)
                began = self.step_began
                self._channel.send(Beat(time.perf_counter() - began if began else 0.0))


class Worker:
    """Runs one engine until told to end."""

    def __init__(self, engine: Any, channel: Channel, pulse: Pulse) -> None:
        self._engine = engine
        self._channel = channel
        self._pulse = pulse
        self._draining = False
        self._closed = False
        self._ledger = Ledger()

    def run(self) -> None:
        while not self._closed and not (self._draining and not self._engine.has_work):
            idle = not self._engine.has_work
            for command in self._commands():
                self._handle(command)
            if idle and self._engine.has_work:
                self._gather(self._engine.batching_window)
            if self._engine.has_work and not self._closed:
                self._step()

    def _commands(self) -> list[Command]:
        if self._engine.has_work:
            return self._channel.receive(0.0)
        began = time.perf_counter()
        commands = self._channel.receive(None)
        self._ledger.idle += time.perf_counter() - began
        return commands

    def _step(self) -> None:
        self._pulse.step_began = began = time.perf_counter()
        events = self._engine.step()
        seconds = time.perf_counter() - began
        self._pulse.step_began = 0.0
        notes = self._engine.notes
        if notes.tokens:
            self._ledger.compute += seconds
            bound = notes.bound or "compute"
            self._ledger.bound[bound] = self._ledger.bound.get(bound, 0.0) + seconds
        if events or notes.started:
            self._channel.send(Step(events, seconds, notes.tokens, notes.started))

    def _gather(self, seconds: float) -> None:
        """Let others join the first request of an idle engine; a running one gathers while it computes."""
        deadline = time.monotonic() + seconds
        while not self._closed and (left := deadline - time.monotonic()) > 0:
            for command in self._channel.receive(left):
                self._handle(command)

    def _handle(self, command: Command) -> None:
        if isinstance(command, Add):
            self._add(command)
        elif isinstance(command, Abort):
            for request_id in command.request_ids:
                self._engine.abort(request_id)
        elif isinstance(command, GetStats):
            ledger = msgspec.to_builtins(self._ledger)
            self._channel.send(Stats({**msgspec.to_builtins(self._engine.stats()), **ledger}))
        elif isinstance(command, Drain):
            self._draining = True
        elif isinstance(command, Close):
            self._closed = True

    def _add(self, command: Add) -> None:
        request = command.request
        try:
            if self._draining:
                raise EngineDeadError("the server is shutting down")
            self._engine.add(request)
        except LMDeployError as error:
            self._channel.send(Rejected(request.request_id, error_kind(error), error.message, error.param))


def _live_and_die_with_parent() -> None:
    """Signals for the parent's process group are the parent's business; its death is ours."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _build(channel: Channel, recipe: Recipe) -> Any:
    """The engine, or None after telling the parent why there is none."""
    try:
        return recipe.build()
    except LMDeployError as error:
        channel.send(Failed(error_kind(error), error.message))
    except Exception as error:  # the edge of the process: the parent must learn of any failure
        traceback.print_exc()
        channel.send(Failed("EngineError", f"the engine could not be built: {type(error).__name__}: {error}"))
    return None


def _info(engine: Any, seconds: float) -> dict[str, Any]:
    capabilities = msgspec.to_builtins(engine.executor.capabilities())
    about = {"pid": os.getpid(), "load_seconds": seconds, "longest_step": engine.longest_step}
    return {**about, **capabilities}


def main(argv: list[str]) -> int:
    _live_and_die_with_parent()
    channel = Channel(socket.socket(fileno=int(argv[1])))
    try:
        commands: list[Command] = []
        while not commands:
            commands = channel.receive(None)
        recipe = commands[0]
        if not isinstance(recipe, Recipe):
            raise TypeError("the first message must be the recipe")
        started = time.monotonic()
        engine = _build(channel, recipe)
        if engine is None:
            return 1
        channel.send(Ready(_info(engine, time.monotonic() - started)))
        pulse = Pulse(channel)
        threading.Thread(target=pulse.run, daemon=True).start()
        Worker(engine, channel, pulse).run()
    except ParentGoneError:
        return 0
    except Exception:  # the edge of the process: say why it ends; the parent restarts it
        traceback.print_exc()
        return 1
    return 0
