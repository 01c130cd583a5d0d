"""Runs a server: socket, web server, what stands behind it, signals, the end.

Owns the order of starting and stopping. Knows no route and no flag. What stands behind the web server is a
`Backend`: engine processes here, other servers in `proxy`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp

from lmdeploy.errors import ConfigError, LMDeployError
from lmdeploy.runtime.client import ProcessClient
from lmdeploy.serve.app import build_app
from lmdeploy.serve.connection import Connection
from lmdeploy.serve.monitor import Monitor
from lmdeploy.serve.served import Server

DRAIN_SECONDS = 30.0
KEYS_SECONDS = 1.0  # between two looks at the files of keys
MAX_FILES = 4096  # that the server process may hold open, where the system allows it


@dataclass(frozen=True, slots=True)
class Listener:
    """Where to listen; TLS when both files are given."""

    host: str
    port: int
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None


class PortInUseError(LMDeployError):
    """Nothing can listen at the address."""


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the address from now on. Raises PortInUseError and ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        # Without this a second server could bind the same address until the first one listens.
        sock.listen(2048)
    except OSError as error:
        sock.close()
        reason = error.strerror or str(error)
        raise PortInUseError(
            f"cannot listen on {host} port {port}: {reason}; choose another address with --server-name and "
            "--server-port"
        ) from None
    except OverflowError:
        sock.close()
        raise ConfigError(f"--server-port {port}: must be between 0 and 65535") from None
    return sock


class _WebServer(uvicorn.Server):  # type: ignore[misc]
    """A uvicorn server that leaves the signals to us: they drain first, and the exit code is 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Backend(Protocol):
    """What stands behind the web server."""

    draining: bool  # nothing new is let in

    async def start(self) -> None:
        """Until requests can be answered."""

    async def drain(self, seconds: float) -> None:
        """Until what runs has finished, or the time has passed."""

    async def close(self) -> None: ...


class Engines:
    """The engines of a server as a Backend."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._beside: list[asyncio.Task[None]] = []  # what runs as long as the engines do

    @property
    def draining(self) -> bool:
        return self._server.draining

    @draining.setter
    def draining(self, value: bool) -> None:
        self._server.draining = value

    async def start(self) -> None:
        """One after the other: loading takes every core already."""
        loop = asyncio.get_running_loop()
        self._beside = [loop.create_task(work) for work in (Monitor(self._server).run(), self._watch_files())]
        if not os.isatty(0):  # else it means that the terminal is gone
            loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        self._server.loading = True
        for client in self._clients():
            await client.start()
        self._server.loading = False

    async def _watch_files(self) -> None:
        """Keys that were added or taken away count within seconds."""
        while True:
            await asyncio.sleep(KEYS_SECONDS)
            await asyncio.to_thread(self._server.keys.refresh)

    def _on_hangup(self) -> None:
        """What a tool that moves log files away sends afterwards."""
        self._server.keys.refresh()
        for report in self._server.reports:
            report.reopen()

    async def drain(self, seconds: float) -> None:
        await asyncio.gather(*(client.drain(seconds) for client in self._clients()))

    async def close(self) -> None:
        for task in self._beside:
            task.cancel()
        await asyncio.gather(*(client.close() for client in self._clients()))

    def _clients(self) -> list[ProcessClient]:
        return [served.client for served in self._server.models]


def run_server(
    server: Server,
    sock: socket.socket,
    listener: Listener,
    announce: Callable[[], None],
    around: Callable[[Backend], Backend] = lambda engines: engines,
    drain_seconds: float | None = None,
) -> None:
    """Serve the models of `server`, as `run_app` does; `around` may put something before its engines."""
    run_app(build_app(server), around(Engines(server)), sock, listener, announce, drain_seconds)


def run_app(
    app: ASGIApp,
    backend: Backend,
    sock: socket.socket,
    listener: Listener,
    announce: Callable[[], None],
    drain_seconds: float | None = None,
) -> None:
    """Serve until a signal comes. `announce` is called when the backend can answer.

    SIGTERM and SIGINT: refuse what is new, finish what runs within `drain_seconds` (None: DRAIN_SECONDS),
    end; a second one ends at once. Raises what the backend raised while it was starting.
    """
    _allow_many_connections()
    seconds = DRAIN_SECONDS if drain_seconds is None else drain_seconds
    _run(_Life(app, backend, sock, listener, announce, seconds).run())


def _allow_many_connections() -> None:
    """Each connection is an open file, and the usual limit of 1024 is the soft one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _run(main: Coroutine[Any, Any, None]) -> None:
    try:
        import uvloop
    except ImportError:  # it does not exist for Windows
        asyncio.run(main)
    else:
        uvloop.run(main)


class _Life:
    """One run of the server from start to end."""

    def __init__(
        self,
        app: ASGIApp,
        backend: Backend,
        sock: socket.socket,
        listener: Listener,
        announce: Callable[[], None],
        drain_seconds: float,
    ) -> None:
        self._backend = backend
        self._drain_seconds = drain_seconds
        self._sock = sock
        self._web = _WebServer(_web_config(app, listener))
        self._announce = announce
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        web = loop.create_task(self._web.serve(sockets=[self._sock]))
        try:
            if await self._started():
                self._announce()
                await self._stop.wait()
            await self._drain()
        finally:
            await self._backend.close()
            self._web.should_exit = True
            await web

    def _on_signal(self) -> None:
        (self._stop_now if self._stop.is_set() else self._stop).set()

    async def _started(self) -> bool:
        """False when a signal came first."""
        start = asyncio.ensure_future(self._backend.start())
        stop = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait([start, stop], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if start.done():
            start.result()
            return True
        start.cancel()
        with contextlib.suppress(asyncio.CancelledError, LMDeployError):
            await start
        return False

    async def _drain(self) -> None:
        """Until what runs has finished, the limit has passed or a second signal has come."""
        self._backend.draining = True
        drain = asyncio.ensure_future(self._backend.drain(self._drain_seconds))
        stop = asyncio.ensure_future(self._stop_now.wait())
        await asyncio.wait([drain, stop], return_when=asyncio.FIRST_COMPLETED)
        for one in (drain, stop):
            one.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await one


def _web_config(app: ASGIApp, listener: Listener) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=2,
        # Longer than clients keep an idle connection: else they send a request just as we close it.
        timeout_keep_alive=75,
        ssl_keyfile=listener.ssl_keyfile,
        ssl_certfile=listener.ssl_certfile,
    )
