"""`lmdeploy check_env`: what this machine and this installation offer, and what is missing.

Every fact comes from a `Probes` object, so that a test can describe any machine. Imports neither torch nor a
model.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmdeploy import __version__
from lmdeploy.cli import cuda_report
from lmdeploy.runtime import gpu

_PACKAGES = (
    "numpy",
    "ml_dtypes",
    "safetensors",
    "tokenizers",
    "huggingface_hub",
    "jinja2",
    "msgspec",
    "fastapi",
    "pydantic",
    "uvicorn",
    "torch",
    "transformers",
)
_FEATURES = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512dq",
    "avx512vl",
    "avx512_vnni",
    "avx512_bf16",
    "avx_vnni",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
    "asimd",
    "asimddp",
    "i8mm",
    "bf16",
    "sve",
)


@dataclass(frozen=True, slots=True)
class Probes:
    """Where the facts come from."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    run: Callable[[Sequence[str]], str | None] = gpu.run_command
    version: Callable[[str], str | None] = cuda_report.distribution_version
    torch_dir: Callable[[], Path | None] = gpu.torch_directory


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser of `lmdeploy`."""
    parser = subparsers.add_parser(
        "check_env",
        aliases=["check-env"],
        help="show what this machine and this installation offer",
        description="Shows versions, CPU, memory, engines and GPU software, and names what does not fit.",
    )
    parser.add_argument("--smoke", action="store_true", help="also run a tiny model, built on the spot")
    parser.add_argument("--dump-file", metavar="FILE", help="also write the facts to this JSON file")


def run(args: argparse.Namespace) -> int:
    """Print the report; exit code 1 when the native engine is missing."""
    facts = collect(Probes())
    print(render(facts))
    if args.dump_file:
        _write_json(Path(args.dump_file), facts)
    if args.smoke:
        from lmdeploy.cli import smoke

        print(f"smoke test: {smoke.run()}")
    return 0 if facts["engines"]["turbomind"]["available"] else 1


def collect(probes: Probes) -> dict[str, Any]:
    """All facts as plain values, sizes in bytes."""
    from lmdeploy.runtime.machine import read_machine

    machine = read_machine(probes.root)
    facts = dataclasses.asdict(machine)
    features = [f for f in _FEATURES if f in machine.cpu_features]
    cpu = {k: facts[k] for k in ("cpu_model", "cores", "logical_cpus", "cpu_quota")}
    report = cuda_report.cuda_report(probes.environ, probes.run, probes.torch_dir(), probes.version("torch"))
    return {
        "lmdeploy": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: probes.version(name) for name in _PACKAGES},
        "cpu": {**cpu, "features": features},
        "memory": {k: facts[k] for k in ("memory_total", "memory_free", "memory_bound")},
        "huge_pages": facts["huge_pages"],
        "engines": {
            "turbomind": native_engine(),
            "pytorch": torch_engine(machine.gpus, gpu.read_torch(probes.torch_dir())),
        },
        "families": _families(),
        "cuda": dataclasses.asdict(report),
    }


def native_engine() -> dict[str, Any]:
    """Whether the extension loads, which kernel sets it can run here and which one it takes."""
    from lmdeploy import turbomind
    from lmdeploy.runtime.resolve import choose_kernels

    try:
        sets = list(turbomind.kernel_sets())
    except ImportError as error:
        return {"available": False, "reason": f"its extension module does not load: {error}"}
    return {"available": True, "kernel_sets": sets, "kernels": choose_kernels()}


def torch_engine(gpus: tuple[gpu.Gpu, ...], torch: gpu.TorchInstall | None) -> dict[str, Any]:
    """Whether torch is installed, and where the engine would compute."""
    from lmdeploy.runtime.engine_choice import INSTALL, Offers

    if torch is None:
        return {"available": False, "reason": f"torch is not installed: {INSTALL}"}
    offers = Offers(gpus, torch)
    device = f"the {offers.card.name}" if offers.card else f"the CPU ({offers.why_no_card()})"
    return {"available": True, "torch": torch.version, "device": device}


def render(facts: Mapping[str, Any]) -> str:
    """The report for people."""
    from lmdeploy.runtime.memory_plan import size

    cpu, memory, pages = facts["cpu"], facts["memory"], facts["huge_pages"]
    quota = "" if cpu["cpu_quota"] is None else f", quota {cpu['cpu_quota']:g}"
    reserved = (
        f"{pages['reserved']} reserved, {pages['reserved_free']} free"
        if pages["reserved"]
        else "none reserved"
    )
    rows = [
        ("lmdeploy", facts["lmdeploy"]),
        ("python", f"{facts['python']} ({sys.executable})"),
        ("platform", facts["platform"]),
        ("packages", ", ".join(f"{k} {v}" for k, v in facts["packages"].items() if v)),
        ("missing", ", ".join(k for k, v in facts["packages"].items() if not v)),
        ("cpu", cpu["cpu_model"]),
        ("features", " ".join(cpu["features"])),
        ("cores", f"{cpu['cores']} to use; {cpu['logical_cpus']} CPUs allowed{quota}"),
        ("memory", f"{size(memory['memory_free'])} free of {size(memory['memory_total'])}, {_bound(memory)}"),
        ("huge pages", f"transparent: {pages['transparent']}; {reserved}"),
        *(("engine", f"{name}: {_engine(engine)}") for name, engine in facts["engines"].items()),
        ("families", ", ".join(facts["families"])),
        *_cuda_rows(facts["cuda"]),
    ]
    return "\n".join(f"{name:<11} {value}" for name, value in rows if value)


def _bound(memory: Mapping[str, Any]) -> str:
    where = memory["memory_bound"]
    return "no control group limits it" if where == "machine" else f"limited by {where}"


def _engine(engine: Mapping[str, Any]) -> str:
    if not engine["available"]:
        return f"not available, {engine['reason']}"
    if "torch" in engine:
        return f"available, torch {engine['torch']} on {engine['device']}"
    return f"available, kernels {engine['kernels']} (of {', '.join(engine['kernel_sets'])})"


def _cuda_rows(cuda: Mapping[str, Any]) -> list[tuple[str, str]]:
    names = {"driver": "driver", "nvcc": "nvcc", "torch_cuda": "torch.version.cuda", "cuda_home": "CUDA_HOME"}
    found = ", ".join(f"{label} {cuda[key]}" for key, label in names.items() if cuda[key])
    rows = [("CUDA", found or "none found; the native engine needs none")]
    return rows + [("mismatch", problem) for problem in cuda["problems"]]


def _families() -> list[str]:
    from lmdeploy.models.registry import FAMILIES

    return [family.name for family in FAMILIES]


def _write_json(path: Path, facts: Mapping[str, Any]) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(facts, indent=2, default=sorted) + "\n")
    partial.replace(path)
