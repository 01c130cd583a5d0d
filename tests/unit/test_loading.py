"""The line a terminal shows while memory is taken."""

from __future__ import annotations

import io
import time

import pytest

from lmdeploy.runtime import loading
from lmdeploy.runtime.loading import Loading

MIB = 2**20


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_it_grow_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([50 * MIB, *(min(60 + 10 * i, 300) * MIB for i in range(1000))])
    monkeypatch.setattr(loading, "resident_bytes", lambda: next(taken))
    monkeypatch.setattr(loading, "_PERIOD", 0.001)
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    with Loading(100 * MIB):
        deadline = time.monotonic() + 30
        while "100.0 MiB of 100.0 MiB" not in screen.getvalue() and time.monotonic() < deadline:
            time.sleep(0.001)
    lines = screen.getvalue().split("\x1b[2K\r")
    assert lines[:2] == ["", "loading: 10.0 MiB of 100.0 MiB in memory, 0 s"]
    assert lines[2].startswith("loading: 20.0 MiB of 100.0 MiB")
    assert lines[-1] == ""


def test_what_is_soon_done_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_PERIOD", 60)
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    with Loading(100 * MIB):
        pass
    assert screen.getvalue() == ""


def test_nothing_where_no_terminal_is(capsys: pytest.CaptureFixture[str]) -> None:
    with Loading(100 * MIB):
        pass
    assert capsys.readouterr().err == ""


def test_memory_of_a_card_is_not_counted() -> None:
    assert Loading(0).line() == "loading: 0 s"
