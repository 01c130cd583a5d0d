"""Drafts without a second model: what followed the last few tokens where prompt or answer had them before.

Summaries, corrections and code edits say again what they were given; most other text does not, and yields no
lead. The search is one NumPy pass over the tokens for each sequence and step, and keeps no index.
"""

from __future__ import annotations

import numpy as np

from lmdeploy.engine.request import Sequence
from lmdeploy.engine.speculation import Lead

_CANDIDATES = 32  # latest places that are compared in full


class PromptLookup:
    """Matches the last `shortest` to `longest` tokens; a lead's kind is how many more than `shortest` match.

    Of the longest matches the latest is followed; where it reaches the end of the text, it is taken to
    repeat.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self.num_kinds = longest - shortest + 1

    def find(self, seq: Sequence) -> Lead | None:
        """The place behind the best match."""
        tokens, n, end = seq.tokens, self._shortest, seq.length
        if end <= n:
            return None
        # Places [p - n, p) before the end that equal the last n tokens.
        last = tokens[end - n : end].tolist()
        places = np.flatnonzero(tokens[n - 1 : end - 1] == last[-1])
        for back in range(2, n + 1):
            places = places[tokens[places + (n - back)] == last[-back]]
        if not len(places):
            return None
        best, longest = 0, 0
        for place in (places[: -_CANDIDATES - 1 : -1] + n).tolist():
            size = n
            while (
                size < self._longest and place > size and tokens[place - size - 1] == tokens[end - size - 1]
            ):
                size += 1
            if size > longest:
                best, longest = place, size
            if size == self._longest:
                break
        return Lead(seq, longest - n, best)

    def propose(self, wanted: list[tuple[Lead, int]]) -> list[list[int]]:
        """What follows each place; from the end of the text on, the drafts themselves."""
        proposals = []
        for lead, count in wanted:
            seq = lead.seq
            drafts: list[int] = seq.tokens[lead.place : min(lead.place + count, seq.length)].tolist()
            period = len(drafts)
            drafts += [drafts[i % period] for i in range(period, count)]
            proposals.append(drafts)
        return proposals

    def forget(self, seq: Sequence) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is held."""
