"""Engines as processes that stay loaded between turns, as far as memory allows.

Knows the protocol of peers/protocol.py and how each peer's worker is started; measures nothing itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure.machine import renice
from measure.rows import OURS, Case, Side

PEERS = Path(__file__).resolve().parents[1] / "peers"


class WorkerError(Exception):
    """A side could not start or measure; the message is for the result table."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Where peers and models are: what peers/setup.py writes."""

    models: Path
    peers: dict[str, dict[str, str]]

    def command(self, side: Side, model: str, threads: int) -> list[str]:
        """WorkerError when the peer or the model's form is not there."""
        path = self.models / f"{model}-{side.form}"
        if not path.exists():
            raise WorkerError(f"{path} is missing: benchmarks/peers/setup.py makes it")
        if side.engine == OURS:
            worker = [sys.executable, str(PEERS / "lmdeploy_worker.py")]
            return [*worker, str(path), str(threads), side.variant]
        if side.engine not in self.peers:
            raise WorkerError(f"{side.engine} is not installed: benchmarks/peers/setup.py does it")
        place = self.peers[side.engine]
        if side.engine == "llama.cpp":
            worker = [sys.executable, str(PEERS / "llamacpp_worker.py"), place["bin"]]
        else:
            worker = [place["python"], str(PEERS / f"{side.engine}_worker.py")]
        return [*worker, str(path), str(threads)]


class Worker:
    """One process. `ask` waits for its answer."""

    def __init__(self, command: list[str], log: Path, start_seconds: float) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("a") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            self.facts: dict[str, Any] = self._next(start_seconds)["ready"]
        except WorkerError:
            self.close()
            raise

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _next(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            self.close()
            raise WorkerError(f"no answer within {seconds:.0f} s") from None
        if not line:
            raise WorkerError(self._end())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer

    def ask(self, case: Case, seconds: float) -> dict[str, Any]:
        request = {"sequences": case.sequences, "prompt": case.prompt, "new": case.new}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(self._end()) from None
        return self._next(seconds)

    def _end(self) -> str:
        """Why the process is gone."""
        code = self._process.wait()
        if code < 0:
            return f"the process was ended by {signal.Signals(-code).name} (SIGKILL: memory ran out)"
        return f"the process ended: {last_line(self._log)}"

    def set_niceness(self, value: int) -> None:
        renice(self._process.pid, value)

    def resident_bytes(self) -> int:
        try:
            fields = Path(f"/proc/{self._process.pid}/statm").read_text().split()
        except OSError:
            return 0
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None and not stream.closed:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def last_line(log: Path) -> str:
    """Of what a process wrote, without the noise of tracebacks."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


class Pool:
    """Workers that stay loaded; when together they hold too much, the quickest to load again goes first."""

    def __init__(self, setup: Setup, threads: int, memory: int, logs: Path, start_seconds: float) -> None:
        self._setup, self._threads, self._memory = setup, threads, memory
        self._logs, self._start_seconds = logs, start_seconds
        self._workers: dict[tuple[str, Side], Worker] = {}

    def get(self, model: str, side: Side) -> Worker:
        """Loaded and ready. WorkerError when it cannot be."""
        key = (model, side)
        if key not in self._workers:
            command = self._setup.command(side, model, self._threads)
            self._shrink()
            log = self._logs / f"{model}-{side.name.replace(' ', '-')}.log"
            self._workers[key] = Worker(command, log, self._start_seconds)
        return self._workers[key]

    def _shrink(self) -> None:
        held = {key: worker.resident_bytes() for key, worker in self._workers.items()}
        while sum(held.values()) > self._memory:
            large = [key for key in held if held[key] > self._memory // 50]
            cheapest = min(large or held, key=lambda key: self._workers[key].facts["load_seconds"])
            del held[cheapest]
            self.drop(*cheapest)

    def drop(self, model: str, side: Side) -> None:
        worker = self._workers.pop((model, side), None)
        if worker is not None:
            worker.close()

    def close(self) -> None:
        for key in list(self._workers):
            self.drop(*key)
