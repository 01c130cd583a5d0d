"""Compress, infer, serve: the three commands that tutorials print, one after the other, on the demo model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from demo_directory import demo_directory

from lmdeploy import GenerationConfig, TurbomindEngineConfig, pipeline

SENTENCES = [
    "the company said it expects to report higher earnings for the quarter",
    "mr. smith who joined the board in N said the offer was fair to shareholders",
    "analysts had expected a loss of N cents a share on revenue of $ N million",
    "trading was heavy as the index fell N points in the first hour",
]
LMDEPLOY = [sys.executable, "-m", "lmdeploy"]


def write_ptb(hub: Path) -> None:
    """A stand-in for the data set, as the hub's client keeps it."""
    folder = hub / "datasets--ptb-text-only--ptb_text_only"
    snapshot = folder / "snapshots" / "c0ffee" / "penn_treebank" / "train"
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("c0ffee")
    rows = [{"sentence": f"{text} {number}"} for number in range(40) for text in SENTENCES]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), snapshot / "0000.parquet")


@contextmanager
def served(folder: Path, *flags: str) -> Iterator[str]:
    """The address of a server."""
    command = [*LMDEPLOY, "serve", "api_server", "./awq_model", *flags]
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output = ""
        assert process.stdout is not None
        for line in process.stdout:
            output += line
            if found := re.search(r"at (http://\S+)/v1$", line):
                yield found[1]
                break
        else:
            raise AssertionError(f"the server did not start: {output}")
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.timeout(900)  # thirty layers are searched; how long depends on what else the machine does
def test_compress_infer_and_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples, lengths and the port are smaller than printed, for time; every flag is there."""
    write_ptb(tmp_path / "hub")
    (tmp_path / "hf_model_dir").symlink_to(demo_directory())
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    words = (
        "lite auto_awq ./hf_model_dir --work-dir ./awq_model --calib-dataset ptb --calib-samples 2"
        " --calib-seqlen 64 --w-bits 4 --w-group-size 128 --batch-size 1 --no-report"
    )
    done = subprocess.run(
        [*LMDEPLOY, *words.split()], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "calibration: 2 windows of 64 tokens (ptb 2)" in done.stdout

    engine_cfg = TurbomindEngineConfig(
        model_format="awq", tp=1, session_len=8192, max_batch_size=64, cache_max_entry_count=0.05
    )
    with pipeline(str(tmp_path / "awq_model"), backend_config=engine_cfg) as pipe:
        gen_cfg = GenerationConfig(temperature=0.7, top_p=0.8, max_new_tokens=16)
        answers = pipe(["介绍一下你自己", "What is the capital of France?"], gen_config=gen_cfg)
        assert len(answers) == 2 and all(answer.text for answer in answers)
        greedy = GenerationConfig(do_sample=False, max_new_tokens=16)
        assert "Paris" in pipe(["What is the capital of France?"], gen_config=greedy)[0].text

    flags = (
        "--model-format awq --server-name 0.0.0.0 --server-port 0 --tp 1 --session-len 8192"
        " --cache-max-entry-count 0.05"
    )
    body = {
        "model": "awq_model",
        "messages": [{"role": "user", "content": "你好"}],
        "temperature": 0.7,
        "max_tokens": 16,
        "stream": True,
    }
    with served(tmp_path, *flags.split()) as address:
        url = f"http://127.0.0.1:{address.rpartition(':')[2]}/v1/chat/completions"
        curl = ["curl", "-sN", url, "-H", "Content-Type: application/json", "-d", json.dumps(body)]
        lines = subprocess.run(curl, capture_output=True, text=True, check=True, timeout=120).stdout.split(
            "\n\n"
        )
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert all(chunk["model"] == "awq_model" for chunk in chunks)
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
