"""What wraps every route, as plain ASGI: records and ids of requests, keys, admission.

Owns who may come in and how many at once. Knows no route but the ones that are open to all.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lmdeploy.errors import AuthenticationError, EngineDeadError, LMDeployError, OverloadedError
from lmdeploy.serve.errors import error_response
from lmdeploy.serve.keys import Keys
from lmdeploy.serve.limits import KeyLimitError, KeyLimits
from lmdeploy.serve.record import RECORD, Record
from lmdeploy.serve.served import Server

CONTROL_PATHS = frozenset({"/abort_request", "/sleep", "/wakeup"})
HEALTH_PATHS = ("/health", "/ping", "/v1/health")
OPEN_PATHS = frozenset((*HEALTH_PATHS, "/openapi.json", "/docs"))
_MAX_ID = 128


class RequestIds:
    """Keeps the record of each request, and tells `done` when it has been answered.

    Gives each answer an `x-request-id`, the client's own where it sent one; drops trailing slashes.
    """

    def __init__(self, app: ASGIApp, done: Callable[[Record], None] | None = None) -> None:
        self._app = app
        self._done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path = scope["path"]
        if len(path) > 1 and path.endswith("/"):
            scope = {**scope, "path": path.rstrip("/") or "/"}
        headers = Headers(scope=scope)
        name = _client_id(headers) or uuid.uuid4().hex
        client = (scope.get("client") or ("",))[0]
        record = Record(name, scope["method"], path, client, traceparent=headers.get("traceparent", ""))

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = name
                record.status = message["status"]
            elif message["type"] == "http.response.body":
                record.sent += len(message.get("body", b""))
                record.complete = not message.get("more_body", False)
            await send(message)

        token = RECORD.set(record)
        try:
            await self._app(scope, receive, send_and_note)
        finally:
            RECORD.reset(token)
            record.ended = time.monotonic()
            record.route = getattr(scope.get("route"), "path", "")
            if self._done is not None:
                self._done(record)


def _client_id(headers: Headers) -> str | None:
    name = headers.get("x-request-id", "")
    return name if 0 < len(name) <= _MAX_ID and name.isascii() and name.isprintable() else None


class ApiKeys:
    """Lets in who has one of the keys, as `Authorization: Bearer K` or `x-api-key: K`."""

    def __init__(self, app: ASGIApp, keys: Keys | Iterable[str]) -> None:
        self._app = app
        self._keys = keys if isinstance(keys, Keys) else Keys(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keys.required or self._is_open(scope):
            return await self._app(scope, receive, send)
        problem = self._problem_with(Headers(scope=scope))
        if problem is None:
            return await self._app(scope, receive, send)
        await error_response(AuthenticationError(problem))(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return scope["method"] == "OPTIONS" or scope["path"] in OPEN_PATHS

    def _problem_with(self, headers: Headers) -> str | None:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        offered = [bearer.strip()] if scheme.lower() == "bearer" else []
        offered += [other] if (other := headers.get("x-api-key")) else []
        if not any(offered):
            return "No API key was sent; send `Authorization: Bearer KEY` or `x-api-key: KEY`."
        key = self._keys.find(offered)
        if key is None:
            return "The API key is wrong."
        if (record := RECORD.get()) is not None:
            record.key = key.name
        return None


class Quotas:
    """Holds each API key to what it may use in a minute."""

    def __init__(self, app: ASGIApp, limits: KeyLimits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = RECORD.get()
        counted = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] not in CONTROL_PATHS
        if not counted or record is None or not record.key:
            return await self._app(scope, receive, send)
        try:
            self._limits.admit(record.key)
        except KeyLimitError as error:
            return await error_response(error)(scope, receive, send)
        try:
            await self._app(scope, receive, send)
        finally:
            self._limits.charge(record.key, sum(p.prompt_tokens + p.generated for p in record.passages))


class Admission:
    """Counts the POST requests that are being answered; refuses more than fit and all while draining.

    What ends requests is let in always. A request counts from the end of its body on: whoever does not finish
    one takes no place from others.
    """

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self._app = app
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] in CONTROL_PATHS:
            return await self._app(scope, receive, send)
        refusal = self._refusal()
        if refusal is not None:
            return await error_response(refusal)(scope, receive, send)
        held = False

        async def receive_and_count() -> Message:
            nonlocal held
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False) and not held:
                if (late := self._refusal()) is not None:
                    raise late
                self._server.active += 1
                held = True
            return message

        try:
            await self._app(scope, receive_and_count, send)
        finally:
            self._server.active -= held

    def _refusal(self) -> LMDeployError | None:
        if self._server.draining:
            return EngineDeadError("The server is shutting down.")
        if self._server.active >= self._server.options.max_requests:
            return OverloadedError(
                f"The server already holds {self._server.active} requests; try again later."
            )
        return None
