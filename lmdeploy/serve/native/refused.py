"""Routes of other kinds of models: a clear refusal instead of "unknown route"."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from lmdeploy.errors import RequestError
from lmdeploy.serve.openai.protocol import Body, parse_body
from lmdeploy.serve.served import Server
from lmdeploy.serve.transport import from_body

_LACKING = {
    "/v1/embeddings": "embeddings: it generates text. Serve an embedding model for that",
    "/pooling": "pooling: it generates text. Serve an embedding or reward model for that",
}


async def refuse(server: Server, request: Request) -> Response:
    """Raises RequestError for every body, for a wrong one and an unknown model first."""
    return await from_body(request, server, lambda server, raw: _refuse(server, raw, request.url.path))


def _refuse(server: Server, raw: bytearray, path: str) -> Response:
    _, name = server.model(parse_body(Body, raw).model)
    raise RequestError(f"The model `{name}` does not support {_LACKING[path]}.", param="model")
