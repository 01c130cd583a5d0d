"""POST /abort_request: ends running requests by the names their clients gave them.

Off unless the server's options allow it: whoever may call it can end the requests of others.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from lmdeploy.errors import MissingFieldError, RequestError
from lmdeploy.serve.native.protocol import AbortBody
from lmdeploy.serve.openai.protocol import parse_body
from lmdeploy.serve.served import Server
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
