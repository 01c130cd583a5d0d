"""The web page at `/` and its files below /web/, for everybody: there is nothing secret in them.

Owns which files there are and how a browser may treat them. The page talks to the API like any other client,
with the key its reader types in.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

_FOLDER = Path(__file__).parent
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_POLICY = (
    "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " object-src 'none'"
)


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    media_type: str
    tag: str


@functools.cache
def _files() -> Mapping[str, _File]:
    """Every file by its path."""
    found = {}
    for path in sorted(_FOLDER.iterdir()):
        if path.suffix in _TYPES:
            body = path.read_bytes()
            tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
            place = "/" if path.name == "index.html" else f"/web/{path.name}"
            found[place] = _File(body, _TYPES[path.suffix], tag)
    return found


class Pages:
    """Answers for the page; all else goes on to `app`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._files = _files()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        file = self._files.get(scope["path"]) if scope["type"] == "http" else None
        if file is None or scope["method"] not in ("GET", "HEAD"):
            return await self._app(scope, receive, send)
        await _response(file, Headers(scope=scope))(scope, receive, send)


def _response(file: _File, headers: Headers) -> Response:
    ours = {
        "ETag": file.tag,
        "Cache-Control": "no-cache",  # ask each time, be told mostly that nothing has changed
        "Content-Security-Policy": _POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    if file.tag in headers.get("if-none-match", ""):
        return Response(status_code=304, headers=ours)
    return Response(file.body, headers=ours, media_type=file.media_type)
