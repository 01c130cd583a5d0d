"""A server process for tests: real HTTP, real engine process, fake executor. Argument: JSON of settings."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from byte_model import make_frontend
from serve_engine import FACTORY
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from lmdeploy.runtime.client import STALLED_STEP, ProcessClient
from lmdeploy.runtime.messages import Recipe
from lmdeploy.serve import connection, launch, registration
from lmdeploy.serve.access_log import AccessLog
from lmdeploy.serve.app import build_app
from lmdeploy.serve.served import SAMPLING_DEFAULTS, Served, Server, ServerOptions

Around = Callable[[launch.Backend], launch.Backend]


def with_stats(server: Server) -> ASGIApp:
    """The application and a route that tells what the engine holds."""
    app = build_app(server)

    async def outer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/stats":
            await JSONResponse(await server.models[0].client.stats())(scope, receive, send)
        else:
            await app(scope, receive, send)

    return outer


def around(proxy_url: str | None, listener: launch.Listener, port: int) -> Around:
    """Registers the server where a proxy is named."""
    if proxy_url is None:
        return lambda engines: engines
    known = registration.Registration(proxy_url, listener, port)
    return lambda engines: registration.Registered(engines, known, ["byte-model"])


def main() -> None:
    settings = json.loads(sys.argv[1])
    launch.DRAIN_SECONDS = settings.pop("drain_seconds", launch.DRAIN_SECONDS)
    for name, value in settings.pop("connection", {}).items():
        setattr(connection, name, value)
    proxy_url = settings.pop("proxy_url", None)
    registration.RENEW_SECONDS = 0.5
    log = settings.pop("access_log", None)
    stalled_step = settings.pop("stalled_step", STALLED_STEP)
    options = ServerOptions(keep_alive=1.0, **settings.pop("options", {}))
    frontend = make_frontend(settings.pop("session_len", 512), defaults=SAMPLING_DEFAULTS)
    launch.build_app = with_stats
    client = ProcessClient(Recipe.of(FACTORY, settings), stalled_step=stalled_step)
    server = Server(
        (Served(frontend, client, "byte-model"),), options, reports=(AccessLog(log),) if log else ()
    )
    with launch.bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        listener = launch.Listener("127.0.0.1", port)
        print(port, flush=True)
        launch.run_server(
            server,
            sock,
            listener,
            lambda: print("ready", client.pid, flush=True),
            around(proxy_url, listener, port),
        )


if __name__ == "__main__":
    main()
