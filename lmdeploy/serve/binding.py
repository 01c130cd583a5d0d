"""What binds an engine: which limit, were it higher, would let more through.

Judges the seconds that an engine process reports; knows no request and no format.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

WINDOW = 10.0  # seconds that are judged together

ADVICE = {
    "no_load": "",
    "compute": "the machine is busy and nobody waits",
    "max_batch_size": "requests wait for a row: raise --max-batch-size",
    "kv_blocks": "requests wait for cache blocks: raise --cache-max-entry-count, or set --quant-policy 8 "
    "or 4",
    "prefill_budget": "requests wait for prompts before them: raise --max-prefill-token-num",
    "long_lane": "long prompts wait for their lane",
}
BOUNDS = tuple(ADVICE)


@dataclass(frozen=True, slots=True)
class Binding:
    """shares: of the window's time, for each of BOUNDS; utilisation: compute / (compute + idle)."""

    bound: str
    shares: Mapping[str, float]
    utilisation: float


class Watch:
    """Keeps what the engine reported during the last window."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, dict[str, float]]] = deque()

    def add(self, stats: Mapping[str, Any]) -> None:
        """`stats` as the engine process answers them; one that was started again begins anew."""
        now, seconds = self._clock(), _seconds(stats)
        if self._seen and sum(seconds.values()) < sum(self._seen[-1][1].values()):
            self._seen.clear()
        self._seen.append((now, seconds))
        # The first entry that is kept is the last one before the window.
        while len(self._seen) > 2 and self._seen[1][0] <= now - WINDOW:
            self._seen.popleft()

    def binding(self) -> Binding:
        """Over the window, or since the start of the process where that is shorter."""
        if not self._seen:
            return Binding("no_load", dict.fromkeys(BOUNDS, 0.0), 0.0)
        first = self._seen[0][1] if len(self._seen) > 1 else dict.fromkeys(BOUNDS, 0.0)
        spent = {name: value - first[name] for name, value in self._seen[-1][1].items()}
        total = sum(spent.values())
        if total <= 0:
            return Binding("no_load", dict.fromkeys(BOUNDS, 0.0), 0.0)
        shares = {name: value / total for name, value in spent.items()}
        return Binding(max(BOUNDS, key=shares.__getitem__), shares, 1.0 - shares["no_load"])


def _seconds(stats: Mapping[str, Any]) -> dict[str, float]:
    """Seconds for each of BOUNDS; they add up to compute + idle."""
    by_bound = stats.get("bound", {})
    seconds = {name: float(by_bound.get(name, 0.0)) for name in BOUNDS}
    seconds["no_load"] = float(stats.get("idle", 0.0))
    return seconds
