"""`lmdeploy serve proxy` in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx


class ProxyProcess:
    """A running proxy; `flags` as on the command line."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "lmdeploy", "serve", "proxy", "--server-name", "127.0.0.1"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.process = subprocess.Popen(
            [*command, "--server-port", "0", *flags], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout is not None
        self.announced = self.process.stdout.readline()
        self.url = self.announced.split(" at ")[1].split("/v1")[0]

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, limits=httpx.Limits(max_connections=None), timeout=60)

    def end(self) -> int:
        self.process.terminate()
        try:
            return self.process.wait(40)
        finally:
            self.process.kill()
            self.process.communicate()


@contextmanager
def proxy_process(*flags: str) -> Iterator[ProxyProcess]:
    proxy = ProxyProcess(*flags)
    try:
        yield proxy
    finally:
        proxy.end()
