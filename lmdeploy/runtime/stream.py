"""The events of requests on their way from the engine to whoever waits for them.

Knows neither the process that produces them nor how they travel.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from lmdeploy.engine.request import TokenEvent
from lmdeploy.errors import LMDeployError


class Stream:
    """Events of one or more requests as they come. Ends when all have finished.

    Iterating raises the error that the engine refused a request with, and EngineDeadError when the engine
    process died. A reader that is slow finds several events waiting; `take` returns them all.
    """

    def __init__(self, abort: Callable[[Iterable[str], bool], None], request_ids: Iterable[str]) -> None:
        self._abort = abort
        self._open = set(request_ids)
        self._failed = False
        self._pending: deque[TokenEvent | LMDeployError] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def push(self, item: TokenEvent | LMDeployError) -> None:
        """Called by the client: an event or the error that ends the stream."""
        if self._failed:
            return
        self._pending.append(item)
        if isinstance(item, LMDeployError):
            self._failed = True
        elif item.finish_reason is not None:
            self._open.discard(item.request_id)
        if self._waiter is not None:
            _wake(self._waiter)

    @property
    def ended(self) -> bool:
        return not self._pending and (self._failed or not self._open)

    async def wait(self, timeout: float | None = None) -> bool:
        """True when events are there or the stream has ended, False when `timeout` seconds passed without."""
        if not self._pending and not self.ended:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = None if timeout is None else loop.call_later(timeout, _wake, self._waiter)
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        return bool(self._pending) or self.ended

    def take(self) -> list[TokenEvent]:
        """The events that are there, in order, without waiting."""
        events: list[TokenEvent] = []
        while self._pending:
            item = self._pending[0]
            if isinstance(item, LMDeployError):
                if events:
                    break
                self._pending.popleft()
                raise item
            self._pending.popleft()
            events.append(item)
        return events

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> TokenEvent:
        await self.wait()
        if self.ended:
            raise StopAsyncIteration
        item = self._pending.popleft()
        if isinstance(item, LMDeployError):
            raise item
        return item

    def abort(self, request_id: str | None = None) -> None:
        """Stop one request, whose answer is complete, or all that still run; nothing more is delivered."""
        ids = self._open & {request_id} if request_id is not None else set(self._open)
        self._open -= ids
        self._abort(ids, request_id is not None)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
