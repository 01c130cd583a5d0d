"""Errors as clients of /v1/messages read them.

Owns the translation of every error answer on these routes, whichever layer made it. Knows no cause.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PREFIX = "/v1/messages"
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(status: int, message: str, request_id: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


class AnthropicErrors:
    """Rewrites the error bodies of these routes; adds the request id under the name clients look for."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and (path == PREFIX or path.startswith(PREFIX + "/")):
            send = _Rewriter(send)
        await self._app(scope, receive, send)


class _Rewriter:
    """Sends on what is no error; holds an error back until it is whole."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None  # of an error answer
        self._body = bytearray()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            if "x-request-id" in headers:
                headers["request-id"] = headers["x-request-id"]
            if message["status"] >= 400:
                self._start = message
                return
        if self._start is None:
            return await self._send(message)
        self._body += message.get("body", b"")
        if not message.get("more_body", False):
            await self._error(self._start)

    async def _error(self, start: Message) -> None:
        body = msgspec.json.encode(
            error_body(start["status"], _message(self._body), Headers(scope=start).get("request-id"))
        )
        MutableHeaders(scope=start)["content-length"] = str(len(body))
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})


def _message(body: bytearray) -> str:
    """What the other protocol's body says; empty for an answer without one."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, LookupError, TypeError):
        return body.decode(errors="replace")
