"""Servers for these tests: real engines on the fake executor, with a vocabulary of bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import openai
from byte_model import make_frontend
from openai_schemas import check_response
from serve_engine import FACTORY

from lmdeploy.engine.request import Request
from lmdeploy.runtime.client import ProcessClient
from lmdeploy.runtime.messages import Recipe
from lmdeploy.serve.app import build_app
from lmdeploy.serve.served import SAMPLING_DEFAULTS, Served, Server, ServerOptions

MODEL = "./models/byte-model"
TEXT = "Hello, wörld 👩‍👩‍👧! Then more.$"  # an answer; "$" stands for its end
ANSWER = TEXT.removesuffix("$")


def request(name: str, text: str, count: int) -> Request:
    """A request to the engine for `count` tokens after the bytes of `text`."""
    return Request(name, np.frombuffer(text.encode(), np.uint8).astype(np.int32), count)


@asynccontextmanager
async def engine_client(**config: Any) -> AsyncIterator[ProcessClient]:
    client = ProcessClient(Recipe.of(FACTORY, config))
    await client.start()
    try:
        yield client
    finally:
        await client.close()


class Api:
    """A server in this process, its engine in another one, and clients for both of its faces."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.served = server.models[0]
        self.app = build_app(server)
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(
            transport=transport, base_url="http://server", event_hooks={"response": [check_response]}
        )
        self.openai = openai.AsyncOpenAI(
            api_key="any", base_url="http://server/v1", http_client=self.http, max_retries=0
        )

    async def chat(self, content: str = "hi", **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        return await self.http.post("/v1/chat/completions", json={"messages": messages, **fields})

    async def complete(self, prompt: Any = "hi", **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": prompt, **fields})

    def configure(self, **options: Any) -> Api:
        """The same engine behind a server with other options."""
        return Api(replace(self.server, options=ServerOptions(**options)))


@asynccontextmanager
async def api(
    script: str = "Hello, world.$",
    session_len: int = 512,
    options: ServerOptions | None = None,
    defaults: dict[str, float] | None = None,
    **config: Any,
) -> AsyncIterator[Api]:
    """An Api whose model answers with `script`; "$" stands for its end."""
    async with engine_client(script=script, **config) as client:
        frontend = make_frontend(session_len, defaults={**SAMPLING_DEFAULTS, **(defaults or {})})
        yield Api(Server((Served(frontend, client, MODEL),), options or ServerOptions()))
