"""What a step costs by the tokens it computes, and how many prompt tokens fit beside running streams.

Knows seconds it was told; measures nothing itself.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

# A running stream waits for at most this many of its quiet steps while prompts are computed beside it. The
# promise is 3; the rest is for what the shortest of a few steps does not show: noise, steps of mixed rows.
GAP = 2.0


@dataclass(frozen=True, slots=True)
class StepCost:
    """Piecewise linear in new tokens, plus attention of each new token to each token before it.

    tokens: ascending, at least two sizes; seconds: of steps with so many new tokens of short sequences;
    pair: seconds for one new token and one token before it.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    pair: float = 0.0

    def step(self, tokens: int) -> float:
        """Seconds of a step of so many new tokens, attention to long contexts apart."""
        at = min(max(bisect_left(self.tokens, tokens), 1), len(self.tokens) - 1)
        x0, x1 = self.tokens[at - 1 : at + 1]
        y0, y1 = self.seconds[at - 1 : at + 1]
        return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)


def gap_seconds(cost: StepCost, decoding: int) -> float:
    """What prompts may add to a step of `decoding` rows: it stays within GAP quiet steps."""
    return (GAP - 1) * cost.step(decoding)


class StreamGap:
    """Room for prompt tokens in a step that has `tokens` others: what adds no more than so many seconds."""

    def __init__(self, cost: StepCost, tokens: int, seconds: float) -> None:
        self._cost = cost
        self._tokens = tokens
        self._left = seconds
        self._least = 1

    def take(self, wanted: int, context: int) -> int:
        """How many of `wanted` tokens after `context` tokens fit; that part of the room is used up.

        The first caller gets at least one token: a prompt must get on whatever it costs.
        """
        count = self._most(wanted, context)
        self._left = self._left - self._added(count, context) if count == wanted else 0.0
        self._tokens += count
        self._least = 0
        return count

    def _most(self, wanted: int, context: int) -> int:
        low, high = self._least, wanted
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._added(middle, context) <= self._left else (low, middle - 1)
        return low

    def _added(self, count: int, context: int) -> float:
        pairs = count * (context + count / 2)
        cost = self._cost
        return cost.step(self._tokens + count) - cost.step(self._tokens) + cost.pair * pairs
