"""What is being answered, by the names that clients gave, so that a client can stop it.

A request may have a `request_id`, which others may have too, and a `session_id`, which no other one that runs
may have. Knows no route.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from lmdeploy.errors import InvalidValueError

Name = tuple[str, str | int]  # ("request_id" | "session_id", value)


@dataclass(slots=True, eq=False)
class Run:
    """One HTTP request that is being answered; `stop` ends it."""

    names: tuple[Name, ...]
    stop: Callable[[], None]


@dataclass(slots=True)
class Running:
    """All runs of a server."""

    _runs: set[Run] = field(default_factory=set)
    _sessions: set[Name] = field(default_factory=set)

    @contextmanager
    def entered(self, names: tuple[Name, ...], stop: Callable[[], None]) -> Iterator[None]:
        """The run is known inside the block. Raises InvalidValueError for a session that runs already."""
        sessions = {name for name in names if name[0] == "session_id"}
        if taken := sessions & self._sessions:
            raise InvalidValueError(
                f"session_id {next(iter(taken))[1]} belongs to a request that is still running.",
                param="session_id",
            )
        run = Run(names, stop)
        self._runs.add(run)
        self._sessions |= sessions
        try:
            yield
        finally:
            self._runs.discard(run)
            self._sessions -= sessions

    def stop(self, name: Name | None) -> int:
        """End the runs of this name, or all of them; how many those were."""
        found = [run for run in self._runs if name is None or name in run.names]
        for run in found:
            run.stop()
        return len(found)
