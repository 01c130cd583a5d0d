"""`serve api_server --config` with two real models: one plan, one budget, HTTPS, a death, an orderly end."""

from __future__ import annotations

import json
import os
import re
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from demo_model import demo_gguf
from tiny_model import write_tiny_model

from lmdeploy.runtime.machine import anonymous_bytes

TLS = Path(__file__).resolve().parents[1] / "support/tls"
BUDGET = 1200
CONFIG = """
server-name: 127.0.0.1
server-port: 0
memory-budget: {budget}MiB
api-keys: ["@{folder}/keys"]
access-log: {folder}/access.log
ssl-keyfile: {tls}/key.pem
ssl-certfile: {tls}/cert.pem
max-body-size: 1MiB
models:
  - model: {demo}
    name: demo
    session-len: 512
    max-batch-size: 4
  - model: {tiny}
    name: tiny
    share: 0.25
    max-batch-size: 2
"""


def serve(config: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lmdeploy", "serve", "api_server", "--config", str(config)]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, stderr=subprocess.STDOUT, text=True, **pipes)


class Server:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "keys").write_text("alice secret\n")
        tiny = write_tiny_model(folder / "tiny-model")
        config = folder / "models.yaml"
        config.write_text(CONFIG.format(budget=BUDGET, folder=folder, tls=TLS, demo=demo_gguf(), tiny=tiny))
        self.process = serve(config)
        self.output = ""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if found := re.search(r"at (https://\S+)/v1$", line):
                self._url = found[1]
                return
        raise AssertionError(f"the server did not start: {self.output}")

    def get(self, path: str, body: Any = None, key: str = "secret") -> Any:
        """Status, and the JSON of the answer. The certificate is checked."""
        data = None if body is None else json.dumps(body).encode()
        head = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        request = urllib.request.Request(self._url + path, data, head)
        trust = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
        try:
            with urllib.request.urlopen(request, timeout=60, context=trust) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def answer(self, model: str, **fields: Any) -> str:
        """Of tokens, so that it is one also where a random model says no words."""
        body = {"model": model, "prompt": "Hi", "max_tokens": 8, "return_token_ids": True, **fields}
        status, answer = self.get("/v1/completions", body)
        assert status == 200, answer
        return str(answer["choices"][0]["token_ids"])

    def engines(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in children.split()]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("several"))
    try:
        yield server
    finally:
        server.process.terminate()
        code = server.process.wait(30)
        server.process.communicate()
        assert code == 0


def test_one_plan_is_printed_before_anything_is_loaded(server: Server) -> None:
    lines = server.output.splitlines()
    plan = next(i for i, line in enumerate(lines) if line.startswith("model "))
    assert [line.split()[0] for line in lines[plan : plan + 4]] == ["model", "demo", "tiny", "web"]
    assert f"of {BUDGET / 1024:.2f} GiB free (the memory budget)" in lines[plan + 4]
    assert "secret" not in server.output
    assert "memory-budget: " in server.output


def test_both_answer_and_stay_within_the_budget(server: Server) -> None:
    status, listed = server.get("/v1/models")
    assert status == 200
    assert {"demo", "tiny"} <= {entry["id"] for entry in listed["data"]}
    assert server.answer("demo") and server.answer("tiny", ignore_eos=True)
    pids = [server.process.pid, *server.engines()]
    assert len(pids) == 3
    assert sum(anonymous_bytes(pid) for pid in pids) < BUDGET * 2**20


def test_keys_and_large_bodies(server: Server) -> None:
    assert server.get("/v1/models", key="wrong")[0] == 401
    status, error = server.get("/v1/completions", {"model": "tiny", "prompt": "x" * (1 << 20)})
    assert (status, error["error"]["code"]) == (413, "request_too_large")


def test_keys_and_log_files_change_while_it_runs(server: Server) -> None:
    keys, log = server.folder / "keys", server.folder / "access.log"
    keys.write_text("alice secret\nbob other\n")
    deadline = time.monotonic() + 10
    while server.get("/v1/models", key="other")[0] != 200:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    log.rename(server.folder / "access.log.1")
    server.process.send_signal(signal.SIGHUP)
    while not log.exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert server.get("/v1/models", key="other")[0] == 200
    while not log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (line,) = map(json.loads, log.read_text().splitlines())
    assert (line["key"], line["path"], line["status"]) == ("bob", "/v1/models", 200)
    assert "secret" not in (server.folder / "access.log.1").read_text()


def test_one_dies_and_the_other_goes_on(server: Server) -> None:
    demo, tiny = server.engines()
    os.kill(tiny, signal.SIGKILL)
    assert server.answer("demo")
    assert server.get("/health")[0] == 200
    assert server.answer("tiny", ignore_eos=True), "it waits for the engine that is started again"
    assert demo in server.engines()
    assert tiny not in server.engines()
    assert server.get("/health")[1]["models"] == {"demo": "ready", "tiny": "ready"}


def test_models_that_do_not_fit_are_refused_at_once(tmp_path: Path) -> None:
    config = tmp_path / "models.yaml"
    entry = f"- {{model: {demo_gguf()}, name: %s}}\n"
    config.write_text("server-port: 0\nmemory-budget: 300MiB\nmodels:\n" + entry % "a" + entry % "b")
    began = time.monotonic()
    process = serve(config)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "the models do not fit together" in output.splitlines()[-1]
    assert "but 300.0 MiB are free" in output
    assert time.monotonic() - began < 30
