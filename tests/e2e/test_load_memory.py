"""Memory while loading: at most the packed weights, one tensor of the file and 200 MB, Python included.

The engine is built in a process of its own, whose greatest resident memory is then compared. Models: the demo
file, and random weights of a half-billion shape in the three forms of files.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from demo_model import demo_gguf

from lmdeploy.models.registry import open_checkpoint
from lmdeploy.runtime.convert import convert

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import random_models

REST = 200 * 10**6
BUILD = """
import sys
from lmdeploy import TurbomindEngineConfig
from lmdeploy.runtime.build import build_engine
from lmdeploy.runtime.resolve import resolve

small = TurbomindEngineConfig(session_len=64, max_batch_size=1, max_prefill_token_num=64)
config = resolve(sys.argv[1], small)
engine = build_engine(config)
status = open("/proc/self/status").read()
print(int(status.split("VmHWM:")[1].split()[0]) * 1024, config.plan.weights)
"""


def peak_and_weights(model: Path) -> tuple[int, int]:
    """Bytes."""
    done = subprocess.run([sys.executable, "-c", BUILD, model], capture_output=True, text=True, check=True)
    peak, weights = map(int, done.stdout.split())
    return peak, weights


def largest_tensor(model: Path) -> int:
    checkpoint = open_checkpoint(model)
    return max(checkpoint.info(name).file_bytes for name in checkpoint.names())


@pytest.fixture(scope="module", params=["demo", *random_models.FORMATS[:3]])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "demo":
        return demo_gguf()
    return random_models.make(tmp_path_factory.mktemp("models"), "0.5b", request.param)


def test_peak_while_packing(model: Path) -> None:
    peak, weights = peak_and_weights(model)
    assert peak <= weights + largest_tensor(model) + REST, (peak, weights)


def test_peak_while_reading_the_packed_form(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "packed")
    peak, weights = peak_and_weights(tmp_path / "packed")
    assert peak <= weights + REST, (peak, weights)
