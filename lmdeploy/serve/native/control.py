"""POST /abort_request, /sleep and /wakeup, GET /is_sleeping: what an operator does to a running server.

Off unless the server's options allow it: whoever may call these can end the requests of others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from starlette.requests import Request
from starlette.responses import Response

from lmdeploy.errors import InvalidValueError, MissingFieldError, RequestError
from lmdeploy.serve.native.protocol import AbortBody
from lmdeploy.serve.openai.protocol import parse_body
from lmdeploy.serve.served import Served, Server
from lmdeploy.serve.transport import from_body, json_response


async def abort_request(server: Server, request: Request) -> Response:
    if not server.options.abort_handling:
        raise RequestError("Aborting is off; start the server with --enable-abort-handling.")
    return await from_body(request, server, _abort)


def _abort(server: Server, raw: bytearray) -> Response:
    body = parse_body(AbortBody, raw)
    if body.abort_all:
        return json_response({"aborted": server.running.stop(None)})
    names = body.names()
    if not names:
        raise MissingFieldError("Send 'session_id', 'request_id' or 'abort_all'.", param="session_id")
    return json_response({"aborted": sum(map(server.running.stop, names))})


_LEVELS = ("1", "2")
_PARTS = ("weights", "kv_cache")


async def sleep(server: Server, request: Request) -> Response:
    """Both levels free weights and cache: the engine process ends, and the files are read again later."""
    served = _asked(server, request)
    level = request.query_params.get("level", "1")
    if level not in _LEVELS:
        raise InvalidValueError(f"'level' must be 1 or 2, got {level[:40]!r}.", param="level")
    await asyncio.gather(*(one.client.sleep() for one in served))
    for one in served:
        one.missing = frozenset(_PARTS)
    return _sleeping(served)


async def wakeup(server: Server, request: Request) -> Response:
    """Memory is taken as a whole, so the engine starts once both parts were asked for, in one call or two."""
    served = _asked(server, request)
    tags = request.query_params.getlist("tags") or _PARTS
    for tag in tags:
        if tag not in _PARTS:
            raise InvalidValueError(f"'tags' can be weights and kv_cache, got {tag[:40]!r}.", param="tags")
    for one in served:  # one after the other: loading takes every core already
        one.missing -= frozenset(tags)
        if not one.missing:
            await one.client.wake()
    return _sleeping(served)


def is_sleeping(server: Server, request: Request) -> Response:
    return _sleeping(_models(server, request))


def _asked(server: Server, request: Request) -> tuple[Served, ...]:
    if not server.options.sleep_mode:
        raise RequestError("Sleeping is off; start the server with --enable-sleep-mode.")
    return _models(server, request)


def _models(server: Server, request: Request) -> tuple[Served, ...]:
    """The model that is named, or all. Raises ModelNotServedError."""
    name = request.query_params.get("model")
    return server.models if name is None else (server.model(name)[0],)


def _sleeping(served: Iterable[Served]) -> Response:
    return json_response({"is_sleeping": any(one.client.asleep for one in served)})
