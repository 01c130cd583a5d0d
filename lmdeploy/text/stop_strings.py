"""Stop strings over a stream of text.

Text is held back only while it may still become a stop string; what is released never shows part of one.
Knows no tokens.
"""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """Feed text piece by piece; the released text joined is the same for every way of cutting it.

    Of several stops the one that is complete first wins; of those complete at the same character, the one
    that starts first. `include` keeps the matched stop string in the released text.
    """

    def __init__(self, stops: Iterable[str], include: bool = False) -> None:
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._longest = max(map(len, self._stops), default=0)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that is now certain to be shown; nothing after a match."""
        if self.matched is not None:
            return ""
        known = len(self._held)
        self._held += text
        found = self._first_match(known)
        if found is not None:
            start, self.matched = found
            return self._release(start + len(self.matched) if self._include else start, forget=True)
        return self._release(len(self._held) - self._doubtful())

    def finish(self) -> str:
        """The end of the text has come: what was held back is text after all."""
        return "" if self.matched is not None else self._release(len(self._held))

    def _first_match(self, known: int) -> tuple[int, str] | None:
        """(start, stop) of the match whose last character comes first; matches end beyond `known`."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = self._held.find(stop, max(0, known - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = start + len(stop), start, stop
        return best and best[1:]

    def _doubtful(self) -> int:
        """Length of the longest suffix that is a proper prefix of some stop string."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0

    def _release(self, end: int, forget: bool = False) -> str:
        released, self._held = self._held[:end], "" if forget else self._held[end:]
        return released
