"""A server in a process of its own, for tests of connections, signals and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import serve_main


class Server:
    """A running server process."""

    def __init__(self, **settings: Any) -> None:
        command = [sys.executable, str(Path(serve_main.__file__)), json.dumps(settings)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        self.url = f"http://127.0.0.1:{self._line()}"
        self.engine_pid = int(self._line().split()[1])

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def http(self, **options: Any) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self.url, limits=limits, timeout=60, **options)

    def child(self) -> int:
        """Process id of the engine that runs now."""
        path = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        with open(path) as file:
            return int(file.read().split()[-1])

    def end(self, patience: float = 10) -> int:
        self.process.terminate()
        try:
            return self.process.wait(patience)
        finally:
            self.process.kill()
            self.process.communicate()


@contextmanager
def running(**settings: Any) -> Iterator[Server]:
    server = Server(**settings)
    try:
        yield server
    finally:
        server.end()


def chat(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": 40, "temperature": 0, "ignore_eos": True, **fields}


def memory(pid: int) -> int:
    """Bytes of anonymous memory of a process, resident or swapped out."""
    with open(f"/proc/{pid}/status") as file:
        found = dict(line.split(":", 1) for line in file)
    return sum(int(found[name].split()[0]) * 1024 for name in ("RssAnon", "VmSwap"))
