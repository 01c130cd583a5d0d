"""Quantising tiny models from the command line, and what came of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lmdeploy.cli.main import main
from lmdeploy.models.reference import Reference
from lmdeploy.models.registry import open_checkpoint

SMALL = ("--calib-samples", "4", "--calib-seqlen", "32")


def quantise(command: str, model: Path, folder: Path, *flags: str) -> int:
    """Exit code of `lmdeploy lite COMMAND` on 4 windows of 32 tokens unless flags say otherwise."""
    report = [] if command == "calibrate" else ["--no-report"]
    return main(["lite", command, str(model), "--work-dir", str(folder), *SMALL, *report, *flags])


def logits(path: Path, ids: list[int]) -> npt.NDArray[np.float32]:
    """float32 [tokens, vocab] of the reference."""
    checkpoint = open_checkpoint(path)
    result = Reference(checkpoint).logits(ids)
    checkpoint.close()
    return result


def config(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return value


def files(folder: Path) -> dict[str, bytes]:
    """Every file but the record, which has times of the source in it."""
    found = (p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "lmdeploy_lite.json")
    return {str(p.relative_to(folder)): p.read_bytes() for p in found}
