"""Wrong input to the commands gives one clear line and exit code 1 or 2, never a traceback."""

from __future__ import annotations

import json
import os
import pty
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from demo_model import demo_gguf
from safetensors.numpy import load_file, save_file
from tiny_model import write_tiny_model


def lmdeploy(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lmdeploy", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def assert_one_line(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode in (1, 2), (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    for word in words:
        assert word in lines[0], lines[0]


def rewrite_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def cut(path: Path, share: float = 0.5) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def nan_weights(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = next(n for n in tensors if n.endswith("q_proj.weight"))
    tensors[name] = np.full_like(tensors[name], np.nan)
    save_file(tensors, folder / "model.safetensors")


FAULTS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "cut-off safetensors": (lambda d: cut(d / "model.safetensors"), ("model.safetensors",)),
    "wrong json": (lambda d: (d / "config.json").write_text("{not json"), ("config.json",)),
    "no config": (lambda d: (d / "config.json").unlink(), ("config.json",)),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), ("safetensors",)),
    "unsupported architecture": (
        lambda d: rewrite_config(d, architectures=["FooForCausalLM"], model_type="foo"),
        ("FooForCausalLM", "LlamaForCausalLM"),
    ),
    "nan weights": (nan_weights, ("q_proj",)),
    "vocabulary mismatch": (lambda d: rewrite_config(d, vocab_size=7), ("vocab",)),
    "wrong hidden size": (lambda d: rewrite_config(d, intermediate_size=48), ("shape",)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_directory(fault: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    damage, words = FAULTS[fault]
    damage(folder)
    assert_one_line(lmdeploy("chat", str(folder), "--prompt", "hi"), *words)


def test_a_terminal_shows_the_plan_before_the_weights_are_read(tmp_path: Path) -> None:
    """Damage that only the values show comes after the plan."""
    nan_weights(write_tiny_model(tmp_path / "model"))
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "lmdeploy", "chat", str(tmp_path / "model"), "--prompt", "hi"]
    done = subprocess.run(command, stderr=theirs, stdout=subprocess.PIPE, timeout=120, check=False)
    lines = os.read(ours, 1 << 16).decode().splitlines()
    for end in (ours, theirs):
        os.close(end)
    assert (done.returncode, done.stdout) == (1, b"")
    assert lines[0].startswith("model")
    assert lines[-1].startswith("lmdeploy: error: ")
    assert "q_proj" in lines[-1]


def test_healthy_directory_answers(tmp_path: Path) -> None:
    done = lmdeploy(
        "chat", str(write_tiny_model(tmp_path / "model")), "--prompt", "hi", "--max-new-tokens", "4"
    )
    assert done.returncode == 0, done.stderr


def test_missing_file() -> None:
    assert_one_line(lmdeploy("chat", "./no/such/model.gguf", "--prompt", "hi"), "no/such/model.gguf")


def test_hub_id_offline() -> None:
    done = lmdeploy("chat", "some-org/some-model", "--prompt", "hi", HF_HUB_OFFLINE="1")
    assert_one_line(done, "some-org/some-model")


def test_cut_off_gguf(tmp_path: Path) -> None:
    file = tmp_path / "half.gguf"
    file.write_bytes(demo_gguf().read_bytes()[:5_000_000])
    assert_one_line(lmdeploy("chat", str(file), "--prompt", "hi"), "half.gguf")


def test_not_a_gguf(tmp_path: Path) -> None:
    file = tmp_path / "text.gguf"
    file.write_text("hello" * 100)
    assert_one_line(lmdeploy("chat", str(file), "--prompt", "hi"), "text.gguf")


def test_model_format_unlike_the_files() -> None:
    assert_one_line(lmdeploy("chat", str(demo_gguf()), "--model-format", "awq", "--prompt", "hi"), "awq")


def test_session_len_that_does_not_fit() -> None:
    done = lmdeploy("chat", str(demo_gguf()), "--session-len", "100000000", "--prompt", "hi")
    assert_one_line(done, "100000000")


def test_prompt_longer_than_session_len() -> None:
    done = lmdeploy("chat", str(demo_gguf()), "--session-len", "64", "--prompt", "word " * 200)
    assert_one_line(done, "64")


def test_zero_length_prompt() -> None:
    assert_one_line(lmdeploy("chat", str(demo_gguf()), "--prompt", ""), "empty")


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = str(tmp_path / "file" / "cache")
    assert_one_line(lmdeploy("chat", "owner/name", "--download-dir", folder, "--prompt", "hi"), folder)


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes"])
def test_a_description_of_other_weights_than_there_are(method: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    rewrite_config(folder, quantization_config={"quant_method": method, "bits": 4, "group_size": 128})
    assert_one_line(lmdeploy("chat", str(folder), "--prompt", "hi"), f"{method!r}")


def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        done = lmdeploy(
            "serve", "api_server", str(demo_gguf()), "--server-name", "127.0.0.1", "--server-port", port
        )
        assert_one_line(done, port)
