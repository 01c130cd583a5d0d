"""Cards this machine offers, as the NVIDIA driver says; and torch, as its files say. Imports neither.

`nvidia-smi` is asked only where the driver is loaded.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmdeploy import env

Run = Callable[[Sequence[str]], str | None]
_DRIVER = ("proc/driver/nvidia/version", "dev/dxg")  # the second under WSL
_QUERY = ["nvidia-smi", "--query-gpu=uuid,name,memory.total,memory.free", "--format=csv,noheader,nounits"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card; bytes."""

    name: str
    memory_total: int
    memory_free: int


@dataclass(frozen=True, slots=True)
class TorchInstall:
    """Version of the installed torch, and of the CUDA release it was built for (None: CPU only)."""

    version: str
    cuda: str | None


def run_command(command: Sequence[str]) -> str | None:
    """Standard output of a command, None where it cannot be run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def read_gpus(root: Path, run: Run = run_command) -> tuple[Gpu, ...]:
    """The cards a process may use, in the order CUDA numbers them here; none without a driver."""
    if not any((root / name).exists() for name in _DRIVER):
        return ()
    rows = [[x.strip() for x in line.split(",")] for line in (run(_QUERY) or "").splitlines()]
    found = [(row[0], Gpu(row[1], _mebibytes(row[2]), _mebibytes(row[3]))) for row in rows if len(row) == 4]
    return tuple(_visible(found, env.CUDA_VISIBLE_DEVICES.text()))


def _mebibytes(text: str) -> int:
    return int(text) * 2**20 if text.isdecimal() else 0


def _visible(found: list[tuple[str, Gpu]], named: str | None) -> list[Gpu]:
    """What CUDA_VISIBLE_DEVICES leaves: numbers or beginnings of ids, up to the first that does not exist."""
    if named is None:
        return [gpu for _, gpu in found]
    cards: list[Gpu] = []
    for name in (x.strip() for x in named.split(",")):
        if name.isdecimal():
            match = [gpu for _, gpu in found[int(name) : int(name) + 1]]
        else:
            match = [gpu for uuid, gpu in found if name and uuid.startswith(name)]
        if not match:
            break
        cards += match[:1]
    return cards


def torch_directory() -> Path | None:
    """Where torch is installed; does not import it."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0])


def read_torch(directory: Path | None) -> TorchInstall | None:
    """What the package in this folder says about itself in version.py."""
    try:
        text = (directory / "version.py").read_text() if directory else ""
    except OSError:
        return None
    version = re.search(r"^__version__\b[^=\n]*=\s*['\"]([^'\"]+)", text, re.M)
    cuda = re.search(r"^cuda\b[^=\n]*=\s*['\"](\d+\.\d+)", text, re.M)
    return TorchInstall(version[1], cuda[1] if cuda else None) if version else None


def installed_torch() -> TorchInstall | None:
    """The torch of this environment, None where there is none."""
    return read_torch(torch_directory())
