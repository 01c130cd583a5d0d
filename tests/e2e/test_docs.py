"""Every command and snippet in README and docs runs.

Fenced blocks are run in the order of their file, in an empty folder: `bash` and `python` must exit with 0,
`bash server` is a server that stays up until the file ends. `make` commands are what runs this test: for them
only the target is looked up. `my-model` is the demo model as a Hugging Face directory.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from demo_directory import demo_directory

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.M | re.S)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@dataclass(frozen=True)
class Block:
    language: str
    server: bool
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(m[1], "server" in m[2].split(), m[3], text.count("\n", 0, m.start()) + 1)
        for m in FENCE.finditer(text)
        if m[1] in ("bash", "python")
    ]


def make_targets(text: str) -> list[str]:
    lines = [line.split("#")[0].strip() for line in text.splitlines() if line.strip()]
    return [line.split()[1] for line in lines] if lines and all(x.startswith("make ") for x in lines) else []


def command(block: Block) -> list[str]:
    interpreter = [sys.executable, "-c"] if block.language == "python" else ["bash", "-euo", "pipefail", "-c"]
    return [*interpreter, block.text]


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@contextmanager
def server(block: Block, folder: Path) -> Iterator[None]:
    port = re.search(r"--server-port[ =](\d+)", block.text)
    url = f"http://127.0.0.1:{port[1] if port else 23333}/health"
    with (folder / "server.log").open("w+") as log:
        process = subprocess.Popen(
            command(block),
            cwd=folder,
            env=environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            wait_until_healthy(process, url, folder / "server.log")
            yield
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(30)


def wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            if urllib.request.urlopen(url, timeout=2).status == 200:
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(f"{url} did not answer: {log.read_text()}")


def run(block: Block, folder: Path) -> None:
    targets = make_targets(block.text)
    if targets:
        makefile = (ROOT / "Makefile").read_text()
        for target in targets:
            assert re.search(rf"^{target}:", makefile, re.M), f"no make target {target}"
        return
    done = subprocess.run(
        command(block),
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"line {block.line}:\n{block.text}\n{done.stdout}\n{done.stderr}"


@pytest.mark.timeout(1800)  # pages that quantise take a minute or two for each model on a quiet machine
@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_of_page(page: Path, tmp_path: Path) -> None:
    found = blocks(page)
    running = [b for b in found if b.server]
    assert len(running) <= 1, "one server a page"
    if any("my-model" in b.text for b in found):
        (tmp_path / "my-model").symlink_to(demo_directory())
    before = found[: found.index(running[0])] if running else found
    for block in before:
        run(block, tmp_path)
    if running:
        with server(running[0], tmp_path):
            for block in found[found.index(running[0]) + 1 :]:
                run(block, tmp_path)
