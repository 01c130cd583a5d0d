"""The NEON kernels against the portable ones, cross-compiled and run under an emulator."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "lmdeploy" / "turbomind" / "csrc"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
FLAGS = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-fno-math-errno", f"-I{CSRC}"]
# As in CMakeLists.txt.
KERNEL_FLAGS = ["-march=armv8.2-a+dotprod", "-fno-exceptions", "-fno-rtti"]


def _missing() -> str:
    absent = [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]
    return f"{' and '.join(absent)} not found (Debian: g++-aarch64-linux-gnu, qemu-user)" if absent else ""


needs_tools = pytest.mark.skipif(bool(_missing()), reason=_missing())


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("neon")
    sources = {
        CSRC / "kernels" / "neon.cpp": KERNEL_FLAGS,
        CSRC / "kernels" / "portable.cpp": [],
        CSRC / "kv_layer.cpp": [],
        ROOT / "tests" / "native" / "compare_kernels.cpp": [],
    }
    for source, more in sources.items():
        command = [COMPILER, *FLAGS, *more, "-c", source, "-o", folder / f"{source.stem}.o"]
        subprocess.run(command, check=True, timeout=300)
    return folder


@needs_tools
def test_neon_and_portable_kernels_agree(objects: Path) -> None:
    program = objects / "compare"
    subprocess.run([COMPILER, "-static", *objects.glob("*.o"), "-o", program], check=True, timeout=300)
    done = subprocess.run([EMULATOR, "-cpu", "max", program], capture_output=True, text=True, timeout=600)
    failed = [line for line in done.stdout.splitlines() if line.endswith("FAILED")]
    assert done.returncode == 0, "\n".join(failed) or done.stderr
    assert done.stdout.endswith("\n0 failed\n")
    assert len(done.stdout.splitlines()) > 500


@needs_tools
def test_int8_products_use_the_dot_product_instruction(objects: Path) -> None:
    listing = subprocess.run(
        ["aarch64-linux-gnu-objdump", "-d", objects / "neon.o"], capture_output=True, text=True, check=True
    ).stdout
    assert listing.count("sdot") > 100


@needs_tools
@pytest.mark.parametrize("source", sorted(p.name for p in CSRC.glob("*.cpp")))
def test_the_rest_of_the_engine_compiles_for_arm(source: str) -> None:
    command = [COMPILER, *FLAGS, "-DLMDEPLOY_ARM", "-fsyntax-only", CSRC / source]
    subprocess.run(command, check=True, timeout=300)
