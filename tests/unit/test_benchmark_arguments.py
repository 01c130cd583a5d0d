"""Numbers on the command lines of the benchmarks."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest
from measure.arguments import positive

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_whole_numbers_from_one() -> None:
    assert [positive(x) for x in ("1", "64")] == [1, 64]


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "x", "1e3", "99999999999", "²"])
def test_other_numbers_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="at least 1"):
        positive(text)


def test_a_benchmark_says_so_in_one_line() -> None:
    command = [sys.executable, BENCHMARKS / "ab.py", "--pairs", "0", "a", "b", "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "'0' is no whole number of at least 1" in done.stderr
    assert "Traceback" not in done.stderr
