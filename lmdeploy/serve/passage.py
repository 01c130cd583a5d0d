"""One engine request on its way: when it reached which station. Numbers only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Passage:
    """Times are seconds on the clock of `RequestTimes`; 0: not reached."""

    request_id: str
    prompt_tokens: int
    submitted: float
    started: float = 0.0  # the first step that computed some of it began
    first: float = 0.0  # its first token arrived
    last: float = 0.0
    generated: int = 0
    cached_tokens: int = 0
    reason: str = ""  # stop, length, abort or error; "" while it runs
    ended: float = 0.0
