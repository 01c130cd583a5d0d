"""Calibration and held-out text for the comparison: parts of the Python that runs it, never shared.

Half technical English (pydoc_data.topics), half code (the standard library), the same for one version of
Python. Documents go to calibration and to held-out in turn, so that both are of one kind and share nothing.
"""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lmdeploy.text.tokenizer import Tokenizer

Window = npt.NDArray[np.int32]
SEED = 0


def prose() -> list[str]:
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def code() -> list[str]:
    """Modules of one file, of a size that a person reads."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(file for file in folder.glob("*.py") if 4_000 < file.stat().st_size < 60_000)
    return [file.read_text(encoding="utf-8") for file in files]


def calibration(tokenizer: Tokenizer, count: int, length: int) -> list[Window]:
    return _windows(tokenizer, 0, count, length)


def held_out(tokenizer: Tokenizer, count: int, length: int) -> list[Window]:
    return _windows(tokenizer, 1, count, length)


def _windows(tokenizer: Tokenizer, turn: int, count: int, length: int) -> list[Window]:
    """`count` windows of `length` tokens, prose and code in turn. ValueError when there is less text."""
    kinds = [_cut(tokenizer, kind()[turn::2], length) for kind in (prose, code)]
    for windows in kinds:
        random.Random(SEED).shuffle(windows)
    mixed = [window for pair in zip(*kinds, strict=False) for window in pair]
    if len(mixed) < count:
        raise ValueError(f"there are {len(mixed)} windows of {length} tokens, {count} were asked for")
    return mixed[:count]


def _cut(tokenizer: Tokenizer, documents: list[str], length: int) -> list[Window]:
    ids = tokenizer.encode("\n\n".join(documents))
    return [np.array(ids[i : i + length], np.int32) for i in range(0, len(ids) - length + 1, length)]
