"""The routes that list, add and remove nodes while the proxy runs."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from lmdeploy.errors import ConfigError, EngineError, InvalidValueError, LMDeployError, RequestError
from lmdeploy.serve.errors import HttpError, from_validation
from lmdeploy.serve.proxy.forward import Proxy
from lmdeploy.serve.proxy.health import probe
from lmdeploy.serve.proxy.nodes import Health, Node
from lmdeploy.serve.proxy.upstream import UpstreamError
from lmdeploy.serve.transport import json_response

_MAX_BODY = 1 << 20
_MAX_NODES = 1024


class StatusBody(BaseModel):
    """What a server says of itself when it registers; the counts are the proxy's own."""

    models: list[str] | None = Field(default=None, max_length=1000)
    role: Any = None
    speed: float | None = Field(default=None, gt=0, le=1e9, allow_inf_nan=False)


class NodeBody(BaseModel):
    """The body of /nodes/add, /nodes/remove and /nodes/terminate."""

    url: str = Field(max_length=2000)
    status: StatusBody | None = None
    renew: bool = False  # a server that has registered before says that it is still there


async def status(proxy: Proxy, _: Request) -> Response:
    """Every node by its URL."""
    return json_response({node.url: node.status() for node in proxy.nodes})


async def add(proxy: Proxy, request: Request) -> Response:
    """Adds a node, or renews what is known of it; it is asked at once whether it is well."""
    body = await _body(request)
    said = body.status or StatusBody()
    if said.role not in (None, "Hybrid", 1):
        raise InvalidValueError(
            "Only role Hybrid is known: prefill and decode are not split.", param="status.role"
        )
    if body.renew and proxy.nodes.was_removed(body.url):
        return json_response({"status": "removed", "url": body.url})
    if proxy.nodes.get(body.url) is None and len(proxy.nodes) >= _MAX_NODES:
        raise RequestError(f"The proxy already knows {_MAX_NODES} nodes.")
    try:
        node = proxy.nodes.add(body.url, said.models or (), said.speed)
    except ConfigError as error:
        raise InvalidValueError(error.message, param="url") from None
    if node.health is not Health.READY:
        await probe(proxy, node)
    return json_response({"status": "added", "url": node.url, "node": node.status()})


async def remove(proxy: Proxy, request: Request) -> Response:
    """The node gets no more requests; those it works on are finished."""
    node = await _named(proxy, request)
    proxy.nodes.remove(node.url)
    return json_response({"status": "removed", "url": node.url})


async def terminate(proxy: Proxy, request: Request) -> Response:
    """Asks a node to end itself, and removes it."""
    node = await _named(proxy, request)
    await _end(proxy, node)
    return json_response({"status": "terminated", "url": node.url})


async def terminate_all(proxy: Proxy, _: Request) -> Response:
    """The same for every node; those that refuse stay."""
    refused = {}
    for node in proxy.nodes:
        try:
            await _end(proxy, node)
        except LMDeployError as error:
            refused[node.url] = error.message
    if refused:
        raise HttpError(502, "; ".join(refused.values()))
    return json_response({"status": "terminated"})


async def _end(proxy: Proxy, node: Node) -> None:
    try:
        async with await node.upstream.send("GET", "/terminate", proxy.own_headers()) as answer:
            await answer.read()
    except UpstreamError as error:
        raise EngineError(f"{node.url}: {error}") from None
    if answer.status != 200:
        raise HttpError(502, f"{node.url} answered {answer.status}: it does not end on request.")
    proxy.nodes.remove(node.url)


async def distserve(_: Proxy, request: Request) -> Response:
    raise HttpError(501, f"{request.url.path}: prefill and decode are not split over servers here.")


async def _named(proxy: Proxy, request: Request) -> Node:
    node = proxy.nodes.get((await _body(request)).url)
    if node is None:
        listed = ", ".join(node.url for node in proxy.nodes) or "none"
        raise HttpError(404, f"No such node; known: {listed[:1000]}.", "node_not_found")
    return node


async def _body(request: Request) -> NodeBody:
    """The JSON body; `?node_url=` in its place, as older versions had it."""
    if "node_url" in request.query_params:
        return _valid(msgspec.json.encode({"url": request.query_params["node_url"]}))
    raw = bytearray()
    async for piece in request.stream():
        raw += piece
        if len(raw) > _MAX_BODY:
            raise HttpError(
                413, f"The body is larger than the limit of {_MAX_BODY} bytes.", "request_too_large"
            )
    return _valid(bytes(raw))


def _valid(raw: bytes) -> NodeBody:
    try:
        return NodeBody.model_validate_json(raw)
    except ValidationError as error:
        raise from_validation(error, NodeBody) from None


ROUTES = (
    ("GET", "/nodes/status", status),
    ("POST", "/nodes/add", add),
    ("POST", "/nodes/remove", remove),
    ("POST", "/nodes/terminate", terminate),
    ("GET", "/nodes/terminate_all", terminate_all),
    ("POST", "/distserve/connection_warmup", distserve),
    ("POST", "/distserve/gc", distserve),
)
