"""The proxy's own application: what is passed on, the routes of its nodes, and what wraps them.

Owns which routes go to a node. Knows no socket.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from lmdeploy import __version__
from lmdeploy.errors import LMDeployError, ModelNotServedError
from lmdeploy.serve import errors
from lmdeploy.serve.middleware import HEALTH_PATHS, ApiKeys, RequestIds
from lmdeploy.serve.proxy import admin
from lmdeploy.serve.proxy.forward import Proxy, forward
from lmdeploy.serve.proxy.health import watch
from lmdeploy.serve.proxy.metrics import metrics
from lmdeploy.serve.proxy.nodes import Health
from lmdeploy.serve.transport import json_response
from lmdeploy.serve.web.pages import Pages

FORWARDED = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/encode",
    "/tokenize",
    "/detokenize",
    "/generate",
    "/pooling",
    "/get_ppl",
)


def build_app(proxy: Proxy, api_keys: Sequence[str] = ()) -> ASGIApp:
    """The whole application."""
    app: ASGIApp = RequestIds(Pages(ApiKeys(_routes(proxy), api_keys)))
    return CORSMiddleware(
        app,
        allow_origins=["*"],
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["x-request-id"],
    )


def _routes(proxy: Proxy) -> ASGIApp:
    def of(handler: Any) -> Any:
        async def endpoint(request: Request) -> Response:
            answer: Response = await handler(proxy, request)
            return answer

        return endpoint

    routes = [Route(path, of(forward), methods=["POST"]) for path in FORWARDED]
    routes += [Route("/tokenizer_info", of(forward), methods=["GET"])]
    routes += [Route(path, of(_health)) for path in HEALTH_PATHS]
    routes += [Route("/v1/models", of(_models)), Route("/v1/models/{name:path}", of(_model))]
    routes += [Route("/version", of(_version)), Route("/metrics", of(metrics))]
    routes += [Route(path, of(handler), methods=[method]) for method, path, handler in admin.ROUTES]
    handlers: Any = {
        LMDeployError: errors.on_known_error,
        HTTPException: errors.on_http_exception,
        ClientDisconnect: _on_disconnect,
        Exception: errors.on_bug,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


async def _health(proxy: Proxy, _: Request) -> Response:
    """200 when at least one node takes requests."""
    states = [node.health for node in proxy.nodes]
    counts = {health.value: states.count(health) for health in Health if health in states}
    well = Health.READY in states and not proxy.draining
    status = "ok" if well else "draining" if proxy.draining else "no server can take a request"
    body = msgspec.json.encode({"status": status, "nodes": counts})
    return Response(body, 200 if well else 503, media_type="application/json")


async def _models(proxy: Proxy, _: Request) -> Response:
    return json_response({"object": "list", "data": proxy.nodes.cards()})


async def _model(proxy: Proxy, request: Request) -> Response:
    name = request.path_params["name"]
    for card in proxy.nodes.cards():
        if name in (card["id"], card.get("root")):
            return json_response({**card, "id": name})
    raise ModelNotServedError(f"The model `{name[:200]}` does not exist.", param="model")


async def _version(proxy: Proxy, _: Request) -> Response:
    return json_response({"version": __version__})


async def _on_disconnect(request: Request, error: Exception) -> Response:
    """The client has left; nobody reads this."""
    return Response(status_code=499)


class Watch:
    """The proxy as a backend of `launch`: watches its nodes while it runs."""

    def __init__(self, proxy: Proxy, interval: float) -> None:
        self._proxy = proxy
        self._interval = interval
        self._watching: asyncio.Task[None] | None = None

    @property
    def draining(self) -> bool:
        return self._proxy.draining

    @draining.setter
    def draining(self, value: bool) -> None:
        self._proxy.draining = value

    async def start(self) -> None:
        self._watching = asyncio.get_running_loop().create_task(watch(self._proxy, self._interval))

    async def drain(self, seconds: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._finished(), seconds)

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        for node in self._proxy.nodes:
            node.upstream.abort("the proxy ends")

    async def _finished(self) -> None:
        while self._proxy.active:
            await asyncio.sleep(0.05)
