"""Starts a stream: errors before the first token are plain answers, later ones are events.

Knows no fields: a route gives an object that turns pieces into events.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Protocol

from starlette.requests import Request

from lmdeploy.serve.openai.generation import Generation, Piece
from lmdeploy.serve.openai.sse import KEEP_ALIVE, ending_well
from lmdeploy.serve.openai.transport import EventStream, while_connected


class Chunks(Protocol):
    """A route's way of writing pieces."""

    def events(self, moments: AsyncIterator[list[Piece]]) -> AsyncGenerator[bytes, None]:
        """Events for each moment, and what follows the last one. An empty moment gives empty bytes."""
        ...


async def stream_response(
    request: Request, generation: Generation, keep_alive: float, chunks: Chunks
) -> EventStream:
    """A stream whose first token exists, or whose client has waited `keep_alive` seconds for it.

    Raises what stops the request before that, and ClientDisconnect.
    """
    moments = generation.pieces(idle=keep_alive)
    first = await while_connected(request.receive, anext(moments))
    return EventStream(ending_well(_written(chunks, _after(first, moments))))


async def _after(
    first: list[Piece], moments: AsyncGenerator[list[Piece], None]
) -> AsyncGenerator[list[Piece], None]:
    async with aclosing(moments):
        yield first
        async for moment in moments:
            yield moment


async def _written(chunks: Chunks, moments: AsyncGenerator[list[Piece], None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(moments), aclosing(chunks.events(moments)) as events:
        async for event in events:
            yield event or KEEP_ALIVE
