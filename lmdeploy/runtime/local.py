"""The engine in this process, shared by any number of threads and half-read generators.

Owns the order of access to the engine, which knows no threads: whoever waits for an event drives it, and what
the step produced for others waits for them. Knows requests and token events; no text.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress

from lmdeploy.engine.loop import Engine
from lmdeploy.engine.request import Request, TokenEvent
from lmdeploy.engine.stats import StepStats
from lmdeploy.errors import EngineDeadError


class LocalClient:
    """Adds, follows and aborts requests of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self._turn = threading.Lock()  # taken first: gives the engine to the threads in the order they came
        self._lock = threading.Lock()
        self._aborts: deque[tuple[str, bool]] = deque()  # request, whether its reader wants to hear of it
        self._waiting: dict[str, deque[TokenEvent]] = {}

    def add(self, request: Request) -> None:
        """Queue a request. Raises what the engine refuses it with."""
        with self._exclusive() as engine:
            engine.add(request)
            self._waiting[request.request_id] = deque()

    def abort(self, request_ids: Iterable[str]) -> None:
        """Stop requests and forget their events; unknown and finished ones are ignored.

        May be called at any moment, also by the garbage collector while this thread is inside a step: it only
        notes the wish, which the next access to the engine carries out first.
        """
        self._aborts.extend((i, False) for i in request_ids)

    def cancel(self, request_id: str) -> None:
        """As `abort`, but whoever follows the request gets a last event with finish_reason "abort"."""
        self._aborts.append((request_id, True))

    def events(self, request_ids: Collection[str]) -> list[TokenEvent]:
        """The next events of these requests, in order; drives the engine until there is one.

        Empty when none of them is known any more (aborted).
        """
        while True:
            with self._exclusive() as engine:
                known = [i for i in request_ids if i in self._waiting]
                ready = [event for i in known for event in self._take(i)]
                if ready or not known:
                    return ready
                assert engine.has_work, "the engine lost a request"
                self._deliver(engine.step())

    def close(self) -> None:
        """Free the engine; later calls raise EngineDeadError. Closing twice is closing once."""
        with suppress(EngineDeadError), self._exclusive() as engine:
            self._engine = None
            self._waiting.clear()
            engine.close()

    def stats(self) -> StepStats:
        with self._exclusive() as engine:
            return engine.stats()

    def _take(self, request_id: str) -> Iterator[TokenEvent]:
        queue = self._waiting[request_id]
        while queue:
            event = queue.popleft()
            yield event
            if event.finish_reason is not None:
                del self._waiting[request_id]
                return

    def _deliver(self, events: Iterable[TokenEvent]) -> None:
        for event in events:
            queue = self._waiting.get(event.request_id)
            if queue is not None:
                queue.append(event)

    @contextmanager
    def _exclusive(self) -> Iterator[Engine]:
        with self._turn:
            self._lock.acquire()
        try:
            if self._engine is None:
                raise EngineDeadError("the pipeline is closed; make a new one")
            self._apply_aborts()
            yield self._engine
        finally:
            self._lock.release()

    def _apply_aborts(self) -> None:
        while self._aborts:
            request_id, tell = self._aborts.popleft()
            if request_id not in self._waiting or self._engine is None:
                continue
            self._engine.abort(request_id)
            if tell:
                self._waiting[request_id].append(TokenEvent(request_id, finish_reason="abort"))
            else:
                del self._waiting[request_id]
