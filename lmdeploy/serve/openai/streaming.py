"""Streams of both routes: how they start, what surrounds each chunk, how they end.

Errors before the first token are plain answers, later ones are events. Knows no fields of a choice: a route
gives a function that turns pieces into entries of `choices`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from starlette.requests import Request

from lmdeploy.serve.generation import Usage
from lmdeploy.serve.openai.protocol import StreamOptions
from lmdeploy.serve.sse import KEEP_ALIVE, ChunkWriter, encode, ending_well
from lmdeploy.serve.transport import EventStream, while_connected

T = TypeVar("T")
Moments = AsyncGenerator[list[T], None]


class ChunkStream(Generic[T]):
    """One stream of `moments(idle)`, each of which is a list of pieces that were made at the same time.

    Each entry that `choices_of` makes of a piece becomes a chunk of its own; `head` is the same in all.
    """

    def __init__(
        self,
        moments: Callable[[float], Moments[T]],
        usage: Callable[[], Usage],
        head: dict[str, object],
        options: StreamOptions | None,
        choices_of: Callable[[T], list[dict[str, Any]]],
    ) -> None:
        self._moments = moments
        self._counts = usage
        self._choices_of = choices_of
        self._usage = bool(options and options.include_usage)
        self._running_usage = bool(self._usage and options and options.continuous_usage_stats)
        self._write = ChunkWriter(head, self._usage)

    async def response(self, request: Request, keep_alive: float) -> EventStream:
        """Starts when the first token exists, or when the client has waited `keep_alive` seconds for it.

        Raises what stops the request before that, and ClientDisconnect.
        """
        moments = self._moments(keep_alive)
        first = await while_connected(request.receive, anext(moments))
        return EventStream(ending_well(self._events(first, moments)))

    async def _events(self, first: list[T], moments: Moments[T]) -> AsyncGenerator[bytes, None]:
        async with aclosing(moments):
            yield self._moment(first)
            async for moment in moments:
                if events := self._moment(moment):
                    yield events
        if self._usage:
            yield self._write.usage(self._usage_now())

    def _moment(self, moment: list[T]) -> bytes:
        """Ready events; empty when all text of the pieces is held back."""
        if not moment:
            return KEEP_ALIVE
        usage = self._usage_now() if self._running_usage else None
        choices = (choice for piece in moment for choice in self._choices_of(piece))
        return b"".join(self._write.chunk(encode(choice), usage) for choice in choices)

    def _usage_now(self) -> bytes:
        return encode(self._counts().body())
