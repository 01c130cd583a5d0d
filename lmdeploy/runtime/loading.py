"""What a terminal shows between the memory plan and the first request: how much is in memory already.

Knows processes and streams, no engine. Nothing is shown where standard error is no terminal.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from lmdeploy.runtime.machine import resident_bytes
from lmdeploy.runtime.memory_plan import size

_PERIOD = 0.25  # seconds between two looks


class Loading:
    """While it is entered, one line on a terminal tells how far this process is with taking `total` bytes,
    or how many of them `done` says are done.

    0 stands for memory that is not this process's, such as a card's. The line is erased at the end;
    what is soon done shows none.
    """

    def __init__(self, total: int, verb: str = "loading", done: Callable[[], int] | None = None) -> None:
        self._total, self._verb, self._done = total, verb, done
        self._before = resident_bytes()
        self._began = time.monotonic()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def line(self) -> str:
        """What is shown now."""
        seconds = time.monotonic() - self._began
        if not self._total:
            return f"{self._verb}: {seconds:.0f} s"
        if self._done is not None:
            return f"{self._verb}: {size(self._done())} of {size(self._total)}, {seconds:.0f} s"
        taken = min(max(resident_bytes() - self._before, 0), self._total)
        return f"{self._verb}: {size(taken)} of {size(self._total)} in memory, {seconds:.0f} s"

    def __enter__(self) -> Loading:
        if sys.stderr.isatty():
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._over.set()
            self._thread.join()

    def _watch(self) -> None:
        shown = False
        while not self._over.wait(_PERIOD):
            _show(self.line())
            shown = True
        if shown:
            _show("")


def _show(line: str) -> None:
    """In place of what the line held before."""
    sys.stderr.write(f"\x1b[2K\r{line}")
    sys.stderr.flush()
