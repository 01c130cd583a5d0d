"""The progress bar of a call with many prompts."""

from __future__ import annotations

from types import TracebackType
from typing import Any


class Progress:
    """Counts finished prompts on standard error; does nothing unless `show`."""

    def __init__(self, total: int, show: bool) -> None:
        self._bar: Any = None
        if show:
            self._bar = _bar()
            self._task = self._bar.add_task("prompts", total=total)

    def advance(self, finished: bool) -> None:
        if self._bar is not None and finished:
            self._bar.advance(self._task)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Bar(*columns, console=Console(stderr=True))
