"""Medians, their intervals, ratios. Plain Python; knows no benchmark.

The interval of a median is distribution-free: from the order statistics whose ranks a fair coin bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

__all__ = ["geometric_mean", "interval", "median", "spread"]


def spread(values: Sequence[float]) -> float:
    """(largest - least) / median; 0 for one value."""
    return (max(values) - min(values)) / median(values)


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers. ValueError when there are none."""
    if not values:
        raise ValueError("the geometric mean of no values is not defined")
    return math.exp(math.fsum(math.log(v) for v in values) / len(values))


def interval(values: Sequence[float], level: float = 0.9) -> tuple[float, float]:
    """Bounds that hold the median of the distribution with at least this probability.

    With few values (below 5 at 0.9) no bounds can promise that: (least, largest) then.
    """
    ordered, n = sorted(values), len(values)
    tail, rank = 0.0, 0
    while rank < n // 2:
        tail += math.comb(n, rank) / 2**n  # chance that at most `rank` values lie below the median
        if 2 * tail > 1 - level:
            break
        rank += 1
    low = max(rank - 1, 0)
    return ordered[low], ordered[n - 1 - low]
