"""`lmdeploy check_env --smoke` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_smoke(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    done = subprocess.run(
        [sys.executable, "-m", "lmdeploy", "check-env", "--smoke", "--dump_file", str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "smoke test: a random model was loaded and generated 32 tokens" in done.stdout
    facts = json.loads(path.read_text())
    assert facts["engines"]["turbomind"]["available"] is True
    assert facts["engines"]["turbomind"]["kernels"] in facts["engines"]["turbomind"]["kernel_sets"]
