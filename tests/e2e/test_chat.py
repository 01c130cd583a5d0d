"""`lmdeploy chat` as a process, with the demo model: one prompt, piped, and at a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

CHAT = [sys.executable, "-m", "lmdeploy", "chat", "--session-len", "1024", "--max-batch-size", "1"]
PROMPT = r"\x1b\[\?2004h"  # the line editor switches bracketed paste on when it begins to read
FRANCE = "What is the capital of France?"


def chat(*flags: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CHAT, *flags],
        input=stdin,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_one_prompt() -> None:
    done = chat("--prompt", FRANCE)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "takes room for one sequence" not in done.stderr  # --max-batch-size was given
    for word in ("weights", "KV cache", "TTFT", "TPOT", "tokens/s"):
        assert word in done.stderr


def test_times_are_those_of_the_answer() -> None:
    """E2E = TTFT + TPOT x (N - 1)"""
    done = chat("--prompt", FRANCE, "--max-new-tokens", "40", "--ignore-eos")
    found = re.search(
        r"TTFT ([\d.]+) ms, TPOT ([\d.]+) ms, ([\d.]+) tokens/s: (\d+) tokens in ([\d.]+) s", done.stderr
    )
    assert found is not None, done.stderr
    ttft, tpot, rate, tokens, e2e = map(float, found.groups())
    assert tokens == 40
    assert (ttft + tpot * 39) / 1e3 == pytest.approx(e2e, abs=0.01)
    assert tokens / e2e == pytest.approx(rate, rel=0.05)


def test_piped_lines_are_turns_of_one_conversation() -> None:
    done = chat("--max-new-tokens", "16", stdin=f"{FRANCE}\nAnd of Italy?\n")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "Rome" in done.stdout
    assert "weights" not in done.stdout
    assert "weights" in done.stderr


def test_seed_repeats_and_its_absence_does_not() -> None:
    flags = ("--prompt", "Tell me a story.", "--temperature", "1", "--max-new-tokens", "24")
    first, second = (chat(*flags, "--random-seed", "7").stdout for _ in range(2))
    assert first == second != ""
    assert chat(*flags).stdout != first


def test_closed_output_is_no_error() -> None:
    command = " ".join([*CHAT, "--ignore-eos", "--max-new-tokens", "64", "--prompt", "hi"])
    done = subprocess.run(
        ["bash", "-c", f"{command} | head -c 3"], capture_output=True, text=True, timeout=240, check=False
    )
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


class Terminal:
    """`lmdeploy chat` behind a pseudo terminal."""

    def __init__(self, *flags: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ["TERM"] = "xterm"
            os.execv(CHAT[0], [*CHAT, *flags])
        self.seen = ""

    def read_until(self, pattern: str, timeout: float = 120) -> str:
        """What was shown since the last call, up to and with the pattern."""
        deadline = time.monotonic() + timeout
        while (found := re.search(pattern, self.seen, re.S)) is None:
            ready = select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))[0]
            assert ready, f"{pattern!r} did not come: {self.seen!r}"
            try:
                data = os.read(self.fd, 65536).decode(errors="replace")
            except OSError:
                data = ""
            assert data, f"the program ended: {self.seen!r}"
            self.seen += data
            if "\x1b[6n" in data:  # the program asks where the cursor is
                os.write(self.fd, b"\x1b[1;1R")
        shown, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return shown

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def wait(self) -> int:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        raise AssertionError("the program does not end")


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal("--ignore-eos", "--max-new-tokens", "900")
    yield made
    try:
        os.kill(made.pid, signal.SIGKILL)
        os.waitpid(made.pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass
    os.close(made.fd)


def test_ctrl_c_stops_the_answer_and_the_chat_goes_on(terminal: Terminal) -> None:
    assert "weights" in terminal.read_until("/help lists")
    terminal.read_until(PROMPT)
    terminal.type(FRANCE + "\r")
    terminal.read_until("Paris")
    terminal.type("\x03")
    terminal.read_until(r"\(stopped\)")
    terminal.read_until(PROMPT)
    terminal.type("/stats\r")
    assert "TTFT" in terminal.read_until("turns in the conversation: 1")
    terminal.read_until(PROMPT)
    terminal.type("/exit\r")
    assert terminal.wait() == 0
