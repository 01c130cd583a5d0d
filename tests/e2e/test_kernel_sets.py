"""The demo model answers with every kernel set this machine can run, each forced in its own process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lmdeploy.turbomind import kernel_sets


@pytest.mark.parametrize("name", kernel_sets())
def test_chat_answers(name: str) -> None:
    command = ["chat", "--prompt", "What is the capital of France?", "--max-new-tokens", "12"]
    done = subprocess.run(
        [sys.executable, "-m", "lmdeploy", *command],
        env={**os.environ, "LMDEPLOY_KERNELS": name},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_unknown_name_is_refused_with_the_supported_ones() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lmdeploy", "chat", "--prompt", "hi"],
        env={**os.environ, "LMDEPLOY_KERNELS": "mmx"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "mmx" in done.stderr and "portable" in done.stderr
