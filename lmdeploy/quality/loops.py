"""Repetition loops in generated tokens.

A loop is a stretch in which the same 1 to 64 tokens follow each other at least 4 times without a change, and
at least 24 tokens long. Numbered or varied repetitions are no loops by this definition.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LONGEST_PERIOD = 64  # tokens
LEAST_TIMES = 4
LEAST_TOKENS = 24


def has_loop(tokens: Sequence[int]) -> bool:
    """Whether there is a loop anywhere in `tokens`."""
    return loop_period(tokens) is not None


def loop_period(tokens: Sequence[int]) -> int | None:
    """Tokens that the first found loop repeats, the shortest period first; None without one."""
    ids = np.asarray(tokens, np.int64)
    for period in range(1, min(LONGEST_PERIOD, len(ids) // LEAST_TIMES) + 1):
        stretch = _longest_run(ids[period:] == ids[:-period]) + period
        if stretch >= max(LEAST_TIMES * period, LEAST_TOKENS):
            return period
    return None


def _longest_run(values: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> int:
    """Of True values one after another."""
    breaks = np.flatnonzero(~np.concatenate([[False], values, [False]]))
    return int(np.diff(breaks).max()) - 1
