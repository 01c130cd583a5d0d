"""llama.cpp's own tools, one process for each measurement.  usage: llamacpp.py BIN FILE.gguf THREADS

Prefill is `llama-bench`'s figure, decode that of `llama-batched-bench`: both without sampling, the weights in
the file cache, warmed up by the tool itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from protocol import Measure, serve


def output(command: list[Any]) -> str:
    done = subprocess.run([str(x) for x in command], capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"{Path(command[0]).name} failed ({done.returncode}): {last}")
    return done.stdout


def prefill(binary: Path, model: str, threads: str, tokens: int) -> float:
    options = ["-t", threads, "-p", tokens, "-n", 0, "-r", 1, "-o", "json"]
    return float(json.loads(output([binary / "llama-bench", "-m", model, *options]))[0]["samples_ts"][0])


def batched(binary: Path, model: str, threads: str, request: dict[str, Any]) -> dict[str, Any]:
    n, prompt, new = request["sequences"], request["prompt"], request["new"]
    sizes = ["-npp", prompt, "-ntg", new, "-npl", n, "-c", n * (prompt + new)]
    text = output(
        [binary / "llama-batched-bench", "-m", model, "-t", threads, *sizes, "--output-format", "jsonl"]
    )
    record = next(json.loads(line) for line in text.splitlines() if line.startswith("{"))
    return {"prefill": n * prompt / record["t_pp"], "decode": n * new / record["t_tg"]}


def load() -> tuple[Measure, dict[str, Any]]:
    binary, model, threads = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    path = Path(model)
    file = next(path.glob("*.gguf")) if path.is_dir() else path
    version = subprocess.run([binary / "llama-bench", "--version"], capture_output=True, text=True)

    def measure(request: dict[str, Any]) -> dict[str, Any]:
        if request["new"] == 1:
            return {"prefill": prefill(binary, str(file), threads, request["prompt"])}
        return batched(binary, str(file), threads, request)

    said = (version.stdout + version.stderr).strip().splitlines()
    named = next((line for line in said if line.startswith("version")), "built from llama-cpp-python")
    return measure, {"version": named}


if __name__ == "__main__":
    serve(load)
