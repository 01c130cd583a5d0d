"""What a machine says about CUDA: driver, toolkit, torch build, CUDA_HOME, and whether they fit together.

Only reads: files, environment and the answers of `nvidia-smi` and `nvcc`. Imports neither torch nor anything
of CUDA. The native engine needs none of it; the report is for people who also build GPU software here.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lmdeploy.runtime.gpu import Run, read_torch

# Oldest Linux driver for each CUDA release line (NVIDIA, CUDA compatibility guide).
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}


@dataclass(frozen=True, slots=True)
class CudaReport:
    """Versions as texts, None where the thing is not there; `problems` are sentences."""

    driver: str | None
    nvcc: str | None
    torch: str | None
    torch_cuda: str | None
    cuda_home: str | None
    problems: tuple[str, ...]


def distribution_version(name: str) -> str | None:
    """Version of an installed package from its metadata."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def cuda_report(
    environ: Mapping[str, str], run: Run, torch_dir: Path | None, torch: str | None
) -> CudaReport:
    """Ask everything once. `torch_dir` is the folder of the installed package, `torch` its version."""
    driver = _driver(run)
    nvcc = _nvcc(run, "nvcc")
    found = read_torch(torch_dir)
    torch_cuda = found.cuda if found else None
    home = environ.get("CUDA_HOME") or None
    problems = _home_problems(home, run, nvcc)
    if nvcc and torch_cuda and nvcc != torch_cuda:
        problems.append(
            f"nvcc is {nvcc}, but torch was built for CUDA {torch_cuda}: extensions built here do not match"
        )
    problems += _driver_problems(driver, torch_cuda, "torch")
    problems += _driver_problems(driver, nvcc, "nvcc")
    return CudaReport(driver, nvcc, torch, torch_cuda, home, tuple(problems))


def _driver(run: Run) -> str | None:
    text = run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    lines = (text or "").split()
    return lines[0] if lines else None


def _nvcc(run: Run, command: str) -> str | None:
    found = re.search(r"release (\d+\.\d+)", run([command, "--version"]) or "")
    return found[1] if found else None


def _home_problems(home: str | None, run: Run, nvcc: str | None) -> list[str]:
    if home is None:
        return []
    if not Path(home).is_dir():
        return [f"CUDA_HOME={home} is no folder"]
    own = _nvcc(run, str(Path(home) / "bin/nvcc"))
    if own is None:
        return [f"CUDA_HOME={home} holds no working bin/nvcc"]
    if nvcc is not None and own != nvcc:
        return [f"CUDA_HOME={home} is CUDA {own}, but the nvcc found first is {nvcc}"]
    return []


def _driver_problems(driver: str | None, cuda: str | None, who: str) -> list[str]:
    if driver is None or cuda is None:
        return []
    oldest = _OLDEST_DRIVER.get(int(cuda.split(".")[0]))
    if oldest is None or int(driver.split(".")[0]) >= oldest:
        return []
    return [f"driver {driver} is too old for CUDA {cuda} of {who}: it needs {oldest} or newer"]
