"""How far a compression is, and for how long it will go on: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

_PERIOD = 15.0  # seconds between lines where there is no terminal


class Progress:
    """Called with a step, how much of all work is done, and how much there is. A context."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._work, self._base, self._began = -1, 0, 0.0
        self._line = time.monotonic()

    def __call__(self, step: str, done: int, work: int) -> None:
        now = time.monotonic()
        if work != self._work or step.endswith("done before"):
            self._work, self._base, self._began = work, done, now
        left = self._left(done, now)
        if self._bar is not None:
            self._bar.update(self._task, description=step, completed=done, total=work, left=left)
        elif now - self._line >= _PERIOD:
            self._line = now
            share = f"{100 * done // work} %" if work else ""
            print(f"{step}; {share}{left and ', ' + left}", file=sys.stderr, flush=True)

    def _left(self, done: int, now: float) -> str:
        """From the mean speed of this run; "" before there is one."""
        if done <= self._base or now - self._began < 1:
            return ""
        seconds = (now - self._began) / (done - self._base) * (self._work - done)
        if seconds >= 5400:
            return f"about {seconds / 3600:.1f} h left"
        return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            self._bar = _bar()
            self._task = self._bar.add_task("", total=None, left="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[left]}"),
    )
    return Bar(*columns, console=Console(stderr=True), transient=True)
