"""What one API key may use in a minute: requests, and tokens of prompts and answers.

A bucket for each key and kind fills evenly and holds a minute's worth. Tokens are known when a request has
ended, so they are charged then: a key may overdraw once and waits until it has paid. Knows no HTTP.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lmdeploy.errors import OverloadedError

_ROUNDING = 1e-6  # seconds that sums of many waits may be off


class KeyLimitError(OverloadedError):
    """A key has used what it may; `retry_after` seconds later it may again."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(slots=True)
class _Bucket:
    """`level`: how much is left at the moment `at`; below 0 it is owed."""

    level: float
    at: float

    def fill(self, now: float, most: int) -> None:
        self.level = min(most, self.level + (now - self.at) * most / 60)
        self.at = now

    def seconds_until(self, wanted: float, most: int) -> float:
        return max(0.0, (wanted - self.level) * 60 / most)


@dataclass(slots=True)
class KeyLimits:
    """Limits in a minute, for each key by its name; None: none. `clock` gives seconds."""

    requests: int | None = None
    tokens: int | None = None
    clock: Callable[[], float] = time.monotonic
    _buckets: dict[tuple[str, str], _Bucket] = field(default_factory=dict, init=False)

    def admit(self, key: str) -> None:
        """Count a request of `key`. Raises KeyLimitError, then it does not count."""
        if self.tokens is not None:
            # One token at least must be left; what the request takes beyond is owed.
            self._require(key, "tokens", self.tokens, 1)
        if self.requests is not None:
            self._require(key, "requests", self.requests, 1)
            self._bucket(key, "requests", self.requests).level -= 1

    def charge(self, key: str, tokens: int) -> None:
        """Tokens that an ended request of `key` has used."""
        if self.tokens is not None:
            self._bucket(key, "tokens", self.tokens).level -= tokens

    def _require(self, key: str, kind: str, most: int, wanted: int) -> None:
        wait = math.ceil(self._bucket(key, kind, most).seconds_until(wanted, most) - _ROUNDING)
        if wait:
            raise KeyLimitError(
                f"This API key may use {most} {kind} a minute and has used them; try again in {wait} s.", wait
            )

    def _bucket(self, key: str, kind: str, most: int) -> _Bucket:
        now = self.clock()
        bucket = self._buckets.setdefault((key, kind), _Bucket(most, now))
        bucket.fill(now, most)
        return bucket
