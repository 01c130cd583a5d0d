"""The sampling rules of lmdeploy/engine/request.py in numpy float64, and Philox4x32-10 in plain integers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[Any]


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Salmon et al. 2011, section 3.3: ten rounds on four 32-bit words."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k1, p0 & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return tuple(c)


def uniform(seed: int, position: int) -> float:
    """53 bits of the block at `position` as a number in [0, 1)."""
    low, high = 0xFFFFFFFF, 32
    words = philox((position & low, position >> high, 0, 0), (seed & low, seed >> high))
    return float(((words[0] << 32 | words[1]) >> 11) / 2**53)


def changed_logits(
    logits: Row,
    bias: Mapping[int, float] = {},
    history: Mapping[int, int] = {},
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> Row:
    x = logits.astype(np.float64)
    for token, value in bias.items():
        x[token] += value
    for token, count in history.items():
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
        x[token] -= (presence + frequency * count) if count else 0
    return x


def distribution(x: Row, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Row:
    """Probabilities after temperature, top_k, top_p and min_p, in that order."""
    weights = np.exp((x - x.max()) / temperature)
    order = np.lexsort((np.arange(len(x)), -x))  # largest first, equal values by id
    kept = order[: top_k or len(x)]
    if top_p < 1:
        mass = np.cumsum(weights[kept])
        kept = kept[: int(np.searchsorted(mass, top_p * mass[-1])) + 1]
    kept = kept[weights[kept] >= min_p]
    probabilities = np.zeros(len(x))
    probabilities[kept] = weights[kept] / weights[kept].sum()
    return probabilities


def draw(probabilities: Row, u: float) -> int:
    """Inverse of the cumulative distribution over ascending ids."""
    return int(np.searchsorted(np.cumsum(probabilities), u, side="right"))


def log_softmax(logits: Row) -> Row:
    x = logits.astype(np.float64)
    return np.asarray(x - x.max() - np.log(np.exp(x - x.max()).sum()))
