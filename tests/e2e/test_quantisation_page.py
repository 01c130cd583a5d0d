"""The figures of docs/concepts/quantisation.md are those that its script prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
# Calibration code comes from the Python that runs: figures differ a little between versions.
SAME, NEAR = 1e-3, 0.15


def blocks(page: str) -> list[list[str]]:
    return [text.splitlines() for text in re.findall(r"^```text\n(.*?)^```", page, re.M | re.S)]


def words(line: str) -> list[str]:
    return NUMBER.sub("#", line).split()


def figures(line: str) -> list[float]:
    return [float(number) for number in NUMBER.findall(line)]


@pytest.mark.timeout(1200)
def test_the_page_shows_what_the_script_prints() -> None:
    shown = blocks((ROOT / "docs/concepts/quantisation.md").read_text())
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/one_layer.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = [part.splitlines() for part in done.stdout.strip("\n").split("\n\n")]
    assert [list(map(words, part)) for part in shown] == [list(map(words, part)) for part in printed]
    for i, (page, run) in enumerate(zip(shown, printed, strict=True)):
        for there, here in zip(page, run, strict=True):
            # the first block is of the weights alone, the others of what calibration text makes of them
            assert figures(there) == pytest.approx(figures(here), rel=NEAR if i else SAME), (there, here)
    check_order([figures(line)[-1] for line in printed[2][1:]])


def check_order(held_out: list[float]) -> None:
    """What the page says of the methods: each is better than what it is added to, on text it has not seen."""
    plain, clip, scales, scales_clip, gptq, every = held_out
    assert max(clip, scales) < plain and scales_clip < min(clip, scales)
    assert gptq < clip and every < min(gptq, scales_clip)
    assert every < 0.35 * plain
