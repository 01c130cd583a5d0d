"""`lmdeploy check_env` on described machines: engines, CUDA parts that do and do not fit together."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lmdeploy.cli import check_env
from lmdeploy.cli.cuda_report import CudaReport, cuda_report
from lmdeploy.cli.main import main
from lmdeploy.runtime.gpu import Gpu, TorchInstall

# As the programs print them.
NVCC = """nvcc: NVIDIA (R) Cuda compiler driver
Copyright (c) 2005-2023 NVIDIA Corporation
Cuda compilation tools, release {release}, V{release}.66
Build cuda_{release}.r{release}/compiler.32688072_0
"""
TORCH_VERSION = """from typing import Optional
__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'xpu']
__version__ = '2.4.0+cu121'
debug = False
cuda: Optional[str] = {cuda}
git_version = 'e4ee3be4063b7c430974252fdf7db42273388d86'
hip: Optional[str] = None
"""


class Commands:
    """Answers of programs by their path; what is not listed cannot be run."""

    def __init__(self, **releases: str) -> None:
        self.answers: dict[str, str] = {}
        for name, release in releases.items():
            self.answers[name] = release + "\n" if name == "nvidia-smi" else NVCC.format(release=release)

    def __call__(self, command: Sequence[str]) -> str | None:
        return self.answers.get(command[0])


def report(
    tmp_path: Path, commands: Commands, cuda: str = "None", environ: Mapping[str, str] | None = None
) -> CudaReport:
    (tmp_path / "version.py").write_text(TORCH_VERSION.format(cuda=cuda))
    return cuda_report(environ or {}, commands, tmp_path, "2.4.0")


def test_nothing_of_cuda() -> None:
    assert cuda_report({}, Commands(), None, None) == CudaReport(None, None, None, None, None, ())


def test_versions_that_fit(tmp_path: Path) -> None:
    commands = Commands(nvcc="12.1", **{"nvidia-smi": "550.54.15"})
    found = report(tmp_path, commands, "'12.1'")
    assert found == CudaReport("550.54.15", "12.1", "2.4.0", "12.1", None, ())


def test_cpu_build_of_torch_has_no_cuda(tmp_path: Path) -> None:
    assert report(tmp_path, Commands(nvcc="12.1")).torch_cuda is None


def test_nvcc_and_torch_of_different_releases(tmp_path: Path) -> None:
    (problem,) = report(tmp_path, Commands(nvcc="11.8"), "'12.1'").problems
    assert "nvcc is 11.8" in problem
    assert "CUDA 12.1" in problem


def test_driver_too_old_for_torch(tmp_path: Path) -> None:
    (problem,) = report(tmp_path, Commands(**{"nvidia-smi": "470.57.02"}), "'12.1'").problems
    assert "driver 470.57.02 is too old for CUDA 12.1 of torch: it needs 525" in problem


def test_cuda_home_of_another_release(tmp_path: Path) -> None:
    commands = Commands(nvcc="12.1")
    commands.answers[str(tmp_path / "bin/nvcc")] = NVCC.format(release="11.8")
    found = report(tmp_path, commands, "'12.1'", {"CUDA_HOME": str(tmp_path)})
    assert found.problems == (f"CUDA_HOME={tmp_path} is CUDA 11.8, but the nvcc found first is 12.1",)


def test_cuda_home_that_is_wrong(tmp_path: Path) -> None:
    missing = report(tmp_path, Commands(), environ={"CUDA_HOME": str(tmp_path / "none")})
    assert missing.problems == (f"CUDA_HOME={tmp_path / 'none'} is no folder",)
    empty = report(tmp_path, Commands(), environ={"CUDA_HOME": str(tmp_path)})
    assert empty.problems == (f"CUDA_HOME={tmp_path} holds no working bin/nvcc",)


@pytest.fixture
def probes(tmp_path: Path) -> check_env.Probes:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n")
    (tmp_path / "proc/cpuinfo").write_text("model name\t: Some CPU\nflags\t: avx2 fma sse\n")
    return check_env.Probes(
        root=tmp_path,
        environ={},
        run=Commands(nvcc="11.8"),
        version=lambda name: {"numpy": "2.0.0"}.get(name),
        torch_dir=lambda: None,
    )


def test_the_report(probes: check_env.Probes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        check_env, "native_engine", lambda: {"available": True, "kernel_sets": ["a", "b"], "kernels": "b"}
    )
    facts = check_env.collect(probes)
    text = check_env.render(facts)
    assert "Some CPU" in text
    assert "4.00 GiB free of 8.00 GiB" in text
    assert "turbomind: available, kernels b (of a, b)" in text
    assert "pytorch: not available, torch is not installed: pip install lmdeploy[torch]" in text
    assert "numpy 2.0.0" in text
    assert "torch" in next(line for line in text.splitlines() if line.startswith("missing"))
    assert "nvcc 11.8" in text
    assert facts["cpu"]["features"] == ["avx2", "fma"]
    assert facts["memory"]["memory_free"] == 4 * 2**30


def test_where_the_pytorch_engine_would_compute(probes: check_env.Probes, tmp_path: Path) -> None:
    (tmp_path / "version.py").write_text(TORCH_VERSION.format(cuda="None"))
    here = dataclasses.replace(probes, torch_dir=lambda: tmp_path)
    text = check_env.render(check_env.collect(here))
    assert "pytorch: available, torch 2.4.0+cu121 on the CPU (this machine has no NVIDIA GPU" in text
    card = Gpu("Some Card", 8 << 30, 6 << 30)
    engine = check_env.torch_engine((card,), TorchInstall("2.4.0", "12.1"))
    assert check_env._engine(engine) == "available, torch 2.4.0 on the Some Card"


def test_why_the_native_engine_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise ImportError("libstdc++.so.6: version `GLIBCXX_3.4.32' not found")

    monkeypatch.setattr("lmdeploy.turbomind.kernel_sets", fail)
    engine = check_env.native_engine()
    assert engine["available"] is False
    assert "GLIBCXX_3.4.32" in engine["reason"]


def test_dump_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = {"available": False, "reason": "test"}
    monkeypatch.setattr(check_env, "native_engine", lambda: missing)
    path = tmp_path / "facts.json"
    assert main(["check_env", "--dump-file", str(path)]) == 1
    facts = json.loads(path.read_text())
    assert facts["engines"]["turbomind"] == missing
    assert facts["cpu"]["cores"] >= 1
    assert "engine" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [path]


def test_unwritable_dump_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check_env", "--dump-file", str(tmp_path / "no" / "facts.json")]) == 1
    err = capsys.readouterr().err
    assert err.startswith("lmdeploy: error: ")
    assert err.count("\n") == 1
