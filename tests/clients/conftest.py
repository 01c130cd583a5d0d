"""One scripted server for all clients. It runs in the interpreter SERVER_PYTHON, which has the package."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SUPPORT = HERE.parent / "support"


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """Where it listens, without a path."""
    paths = os.pathsep.join((str(SUPPORT), str(HERE.parents[1])))
    process = subprocess.Popen(
        [os.environ["SERVER_PYTHON"], str(SUPPORT / "scripted.py"), str(HERE / "recordings.json")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert process.stdout is not None
    port = process.stdout.readline().strip()
    assert process.stdout.readline().strip() == "ready", "the scripted server did not start"
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    assert process.wait(30) == 0


@pytest.fixture(scope="session")
def base_url(address: str) -> str:
    return address + "/v1"
