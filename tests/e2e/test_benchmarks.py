"""The smallest selection of each benchmark runs, without any peer: so that none is broken unseen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from demo_model import demo_gguf

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def output(script: str, *arguments: object) -> str:
    command = [sys.executable, str(BENCHMARKS / script), *(str(x) for x in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def demo_folder(tmp_path: Path) -> Path:
    """A folder of models as bench_native.py looks for them."""
    models = tmp_path / "models"
    models.mkdir()
    (models / "135m-q4_0").symlink_to(demo_gguf().parent)
    return models


def test_bench_native_measures_resumes_and_names_what_is_missing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--model-dir", demo_folder(tmp_path), "--out", out, "--rounds", 1, "--extras"]
    row = ["--models", "135m", "--rows", "prefill512", "--sides", "lmdeploy auto", "llama.cpp Q4_K_M"]
    text = output("bench_native.py", *options, *row)
    assert "of the int8 peak" not in text  # that is asked of another model
    assert "| lmdeploy auto | " in text
    assert "llama.cpp Q4_K_M: failed: " in text and "setup.py makes it" in text
    results = json.loads((out / "results.json").read_text())
    assert results["rows"][0]["turns"][0]["prefill"] > 0
    again = output("bench_native.py", *options, *row)
    assert "lmdeploy auto: " not in again  # nothing is measured twice
    assert (out / "chart.svg").read_text().startswith("<svg")


def test_bench_lite_measures_resumes_and_names_what_is_missing(tmp_path: Path) -> None:
    few = ["--models", "demo", "--samples", 2, "--length", 64, "--windows", 1, "--out", tmp_path]
    sides = ["--cases", "group 128", "bits", "--sides", "plain rounding", "Q4_0"]
    text = output("lite/bench_lite.py", *few, *sides)
    assert "| original | 16 | " in text and "| plain rounding | 4.17 | " in text
    assert "demo, bits, Q4_0: skipped: llama.cpp: not installed" in text
    assert "in memory: bytes / float16's | <= 0.3 | 0.2" in text
    again = output("lite/bench_lite.py", *few, *sides)
    assert "plain rounding: perplexity" not in again  # nothing is measured twice
    other = [
        sys.executable,
        str(BENCHMARKS / "lite" / "bench_lite.py"),
        "--windows",
        "2",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(other, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "give --fresh or another --out" in done.stderr


def test_readers_names_packages_that_are_not_there(tmp_path: Path) -> None:
    text = output("lite/readers.py", "--rivals", tmp_path / "none.toml", "--out", tmp_path)
    assert text.count("skipped: not installed") == 7 and "| w8a8, 8 bits, even | llmcompressor" in text


def test_engine_overhead() -> None:
    text = output("engine_overhead.py", "--steps", 20, "--model", demo_gguf())
    assert "| 1 x 512 |" in text and "| 64 | " in text


def test_profile_step() -> None:
    text = output("profile_step.py", "--decode", 1, "--context", 32, "--prefill", 0, "--steps", 4)
    assert "decode, 1 sequences" in text


def test_accuracy() -> None:
    text = output("accuracy.py", "--windows", 1, "--accuracies", "auto")
    assert "| auto | " in text and "255 positions" in text


def test_ab_compares_two_builds(tmp_path: Path) -> None:
    """A command that takes no time in one build and sleeps in the other: the ratio is far from 1."""
    builds = [tmp_path / "a", tmp_path / "b"]
    for build, seconds in zip(builds, (0.0, 0.6), strict=True):
        build.mkdir()
        (build / "what.py").write_text(
            f"import time\ntime.sleep({seconds})\nprint('figure', {1 + seconds})\n"
        )
    command = ["--", sys.executable, "-m", "what"]
    text = output("ab.py", *builds, "--pairs", 5, "--what", "wall", *command)
    assert text.strip().endswith("5 pairs: a difference")
    text = output("ab.py", *builds, "--pairs", 5, "--pattern", r"figure ([0-9.]+)", *command)
    assert "median 1.6000, 90 % interval 1.6000 to 1.6000" in text
    same = output("ab.py", builds[0], builds[0], "--pairs", 2, "--pattern", "figure ([0-9.]+)", *command)
    assert same.strip().endswith("no difference shown")


def test_ab_names_a_command_that_fails(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "ab.py"), str(tmp_path), str(tmp_path), "--", "false"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "the command failed" in done.stderr


def test_serve_streams() -> None:
    few = ["--streams", 2, "--requests", 2, "--tokens", 4, "--prompt-words", 5, "--rounds", 1]
    assert "| lmdeploy | " in output("serve_streams.py", *few)


def test_stream_gap() -> None:
    assert "quiet" in output("stream_gap.py", "--prompt-tokens", 64, "--prompts", 1)


def test_speculative() -> None:
    assert "ratio" in output("speculative.py", "--pairs", 1, "--tokens", 16)


def test_native_kernels() -> None:
    assert "of peak" in output("native_kernels.py", "--quick", "--repeats", 1, "--megabytes", 4)


def test_pack_weights() -> None:
    assert "GB/s" in output("pack_weights.py", "--repeats", 1)


def test_random_models_lists_what_it_makes(tmp_path: Path) -> None:
    assert "q4_k_m" in output("random_models.py", tmp_path)


def test_native_steps() -> None:
    assert "x read" in output("native_steps.py", "--rows", "1", "--prefill", "8", "--seconds", 0.05)
