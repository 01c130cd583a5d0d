"""The ASGI application: routes and what wraps them.

Owns the order of the layers: CORS outermost, so that refusals carry its headers too; then the error bodies of
other protocols, request ids, keys, admission, routes. Knows no socket.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp

from lmdeploy import __version__
from lmdeploy.errors import LMDeployError
from lmdeploy.serve import document, errors
from lmdeploy.serve.anthropic.errors import AnthropicErrors
from lmdeploy.serve.anthropic.messages import count_tokens, messages
from lmdeploy.serve.anthropic.protocol import CountBody, MessagesBody
from lmdeploy.serve.docs_page import docs_page
from lmdeploy.serve.limits import KeyLimits
from lmdeploy.serve.metrics import metrics
from lmdeploy.serve.middleware import HEALTH_PATHS, Admission, ApiKeys, Quotas, RequestIds
from lmdeploy.serve.native.control import abort_request, is_sleeping, sleep, wakeup
from lmdeploy.serve.native.generate import generate, get_ppl
from lmdeploy.serve.native.prompts import kept_prompts
from lmdeploy.serve.native.protocol import (
    AbortBody,
    DetokenizeBody,
    EncodeBody,
    GenerateBody,
    PerplexityBody,
    TokenizeBody,
)
from lmdeploy.serve.native.refused import refuse
from lmdeploy.serve.native.tokens import detokenize, encode, tokenize, tokenizer_info
from lmdeploy.serve.openai.chat import chat_completions
from lmdeploy.serve.openai.completions import completions
from lmdeploy.serve.openai.models import get_model, list_models
from lmdeploy.serve.openai.protocol import Body, ChatBody, CompletionBody
from lmdeploy.serve.openai.responses import responses
from lmdeploy.serve.openai.responses_input import ResponsesBody
from lmdeploy.serve.served import Server
from lmdeploy.serve.transport import json_response
from lmdeploy.serve.web.pages import Pages

Handler = Callable[[Request], Awaitable[Response]]


def build_app(server: Server) -> ASGIApp:
    """The whole application."""
    options = server.options
    app: ASGIApp = Quotas(
        Admission(_routes(server), server), KeyLimits(options.key_requests, options.key_tokens)
    )
    app = ApiKeys(app, server.keys)
    if options.web_page:
        app = Pages(app)
    app = AnthropicErrors(RequestIds(app, server.answered))
    return CORSMiddleware(
        app,
        allow_origins=options.allow_origins,
        allow_methods=options.allow_methods,
        allow_headers=options.allow_headers,
        allow_credentials=options.allow_credentials,
        expose_headers=["x-request-id", "request-id"],
    )


def _routes(server: Server) -> FastAPI:
    app = FastAPI(
        title="LMDeploy",
        version=__version__,
        # The framework's own explorers load their scripts from other hosts; the document itself needs none.
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json" if server.options.docs else None,
        redirect_slashes=False,
    )
    app.add_exception_handler(LMDeployError, errors.on_known_error)
    app.add_exception_handler(HTTPException, errors.on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, errors.on_bug)
    for path in HEALTH_PATHS:
        _get(app, path, lambda r: _health(server, r), in_schema=path == "/health")
    _get(app, "/version", lambda _: _version())
    if server.options.metrics:
        _get(app, "/metrics", lambda _: metrics(server), text=True)
    _get(app, "/v1/models", lambda _: _async(list_models(server)))
    _get(app, "/v1/models/{name:path}", lambda r: _async(get_model(server, r.path_params["name"])))
    _post(app, "/v1/chat/completions", lambda r: chat_completions(server, r), ChatBody)
    _post(app, "/v1/completions", lambda r: completions(server, r), CompletionBody)
    _post(app, "/v1/responses", lambda r: responses(server, r), ResponsesBody)
    _post(app, "/v1/messages", lambda r: messages(server, r), MessagesBody)
    _post(app, "/v1/messages/count_tokens", lambda r: count_tokens(server, r), CountBody)
    _native_routes(app, server)
    return app


def _native_routes(app: FastAPI, server: Server) -> None:
    """What is not OpenAI's."""
    _get(
        app,
        "/tokenizer_info",
        lambda r: _async(tokenizer_info(server, r.query_params.get("model"))),
        query=("model",),
    )
    _get(app, "/prompts/{name:path}", lambda r: _async(kept_prompts(server, r.path_params["name"])))
    _post(app, "/tokenize", lambda r: tokenize(server, r), TokenizeBody)
    _post(app, "/detokenize", lambda r: detokenize(server, r), DetokenizeBody)
    _post(app, "/v1/encode", lambda r: encode(server, r), EncodeBody)
    _post(app, "/generate", lambda r: generate(server, r), GenerateBody)
    _post(app, "/get_ppl", lambda r: get_ppl(server, r), PerplexityBody)
    _post(app, "/abort_request", lambda r: abort_request(server, r), AbortBody)
    _post(app, "/sleep", lambda r: sleep(server, r), query=("level", "model"))
    _post(app, "/wakeup", lambda r: wakeup(server, r), query=("tags", "model"))
    _get(app, "/is_sleeping", lambda r: _async(is_sleeping(server, r)), query=("model",))
    for path in ("/v1/embeddings", "/pooling"):
        _post(app, path, lambda r: refuse(server, r), Body)
    if server.options.docs:
        _get(app, "/docs", lambda _: _async(HTMLResponse(docs_page(app.openapi()))), in_schema=False)


def _get(
    app: FastAPI,
    path: str,
    handler: Handler,
    in_schema: bool = True,
    query: tuple[str, ...] = (),
    text: bool = False,
) -> None:
    """A GET route that also answers HEAD. `query`: its parameters; `text`: it answers plain text."""

    async def endpoint(request: Request) -> Response:
        return await handler(request)

    endpoint.__name__ = "get" + path.partition("{")[0].replace("/", "_")
    app.add_api_route(
        path,
        endpoint,
        methods=["GET"],
        include_in_schema=in_schema,
        response_class=Response,
        responses=document.responses(path, text=text),
        openapi_extra={"parameters": document.parameters(path, query)},
    )
    app.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)


def _post(
    app: FastAPI,
    path: str,
    handler: Handler,
    body: type[Any] | None = None,
    query: tuple[str, ...] = (),
) -> None:
    """A POST route that reads its body itself; `body` is its schema, `query` its parameters."""

    async def endpoint(request: Request) -> Response:
        return await handler(request)

    endpoint.__name__ = "post" + path.replace("/", "_")
    app.add_api_route(
        path,
        endpoint,
        methods=["POST"],
        response_class=Response,
        responses=document.responses(path, streams=body is not None and "stream" in body.model_fields),
        openapi_extra={
            "parameters": document.parameters(path, query),
            **({} if body is None else {"requestBody": document.request_body(body)}),
        },
    )


async def _async(response: Response) -> Response:
    return response


async def _health(server: Server, request: Request) -> Response:
    """200 when the engine can answer, or sleeps because it was told to; of several, once all were loaded, any
    one, or that of `?model=`."""
    name = request.query_params.get("model")
    models = server.models if name is None else (server.model(name)[0],)
    states = {served.ids[0]: served.client.state for served in models}
    ready = "ready" in states.values() and not server.draining and not server.loading
    body: dict[str, Any] = {"status": "ok" if ready else "engine not ready"}
    if "asleep" in states.values() and not (ready or server.draining or server.loading):
        ready, body["status"] = True, "sleeping"
    if server.draining:
        body["status"] = "draining"
    if len(server.models) > 1:
        body["models"] = states
    return Response(msgspec.json.encode(body), 200 if ready else 503, media_type="application/json")


async def _version() -> Response:
    return json_response({"version": __version__})


async def _on_disconnect(request: Request, error: Exception) -> Response:
    """The client has left; nobody reads this."""
    return Response(status_code=499)
