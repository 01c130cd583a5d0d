"""The JavaScript clients: each file of `node/` is run by node's own test runner."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

NODE = Path(__file__).parent / "node"


@pytest.mark.parametrize("name", sorted(path.name for path in NODE.glob("*.test.mjs")))
def test_node(address: str, name: str) -> None:
    environment = {**os.environ, "ADDRESS": address}
    done = subprocess.run(
        ["node", "--test", name], cwd=NODE, env=environment, capture_output=True, text=True, timeout=100
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert "\n# fail 0" in done.stdout or "ℹ fail 0" in done.stdout
