"""What a rival's worker is told and what it answers. Runs in the rivals' environments: standard library only.

    python WORKER.py JOB.json

A job to quantise names `model` and `out` (directories), `samples` (a JSON file: lists of token ids, the same
for every rival), `bits`, `group`, `symmetric` and `method`; the worker writes `out`. A job to read names
`model` and `out`, a safetensors file for the dequantised float32 matrices by module name. The last line on
standard output is the answer as JSON; all else goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

Job = dict[str, Any]


def samples_of(job: Job) -> list[list[int]]:
    found: list[list[int]] = json.loads(Path(job["samples"]).read_text())
    return found


def answer(package: str, work: Callable[[Job], None]) -> None:
    """Does the job named on the command line."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = json.loads(Path(sys.argv[1]).read_text())
    work(job)
    print(json.dumps({"version": f"{package} {version(package)}"}), file=said, flush=True)
