"""Sequences that have not been looked at yet, and which of them is next.

The smaller priority goes first. Among equals it is the account that has been served least, and of one account
the request that came first. An account is whoever requests are counted for: the holder of a key. One that
comes back after a rest begins level with the least served of those that stayed: it is not owed the time it
was away (Sheng et al. 2024, "Fairness in Serving Large Language Models"). Knows no budget and no block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from lmdeploy.engine.request import Sequence

OUTPUT_COST = 4  # prompt tokens that a generated token counts for; so do public price lists
Rank = tuple[int, int, int]  # priority; 0: looked at, 1: not yet; number of the look or of the arrival
_Line = OrderedDict[Sequence, None]


class Account:
    """What one caller has been served, in prompt tokens."""

    __slots__ = ("ended", "live", "started")

    def __init__(self) -> None:
        self.ended = 0  # cost of its sequences that are gone
        self.started: set[Sequence] = set()  # looked at and not gone
        self.live = 0  # sequences, looked at or not

    @property
    def served(self) -> int:
        return self.ended + sum(map(cost, self.started))


def cost(seq: Sequence) -> int:
    """What the sequence has been given so far; a prompt counts from the start, what was cached does not."""
    return seq.num_prompt - seq.cached_tokens + OUTPUT_COST * seq.num_output


class Queue:
    """Lines of sequences by lane, priority and account. A sequence stays known until `settle`."""

    def __init__(self) -> None:
        self._lines: dict[tuple[bool, int], dict[str, _Line]] = {}  # by (is_long, priority), then account
        self._accounts: dict[str, Account] = {}
        self._looks = 0

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for lines in self._lines.values() for line in lines.values() for seq in line)

    def add(self, seq: Sequence) -> None:
        request = seq.request
        account = self._accounts.setdefault(request.account, Account())
        if account.live == 0:
            others = [other.served for other in self._accounts.values() if other.live]
            account.ended = max(account.ended, min(others, default=0))
        account.live += 1
        seq.rank = (request.priority, 1, seq.order)
        lines = self._lines.setdefault((seq.is_long, request.priority), {})
        lines.setdefault(request.account, OrderedDict())[seq] = None

    def peek(self, is_long: bool) -> Sequence | None:
        """The sequence of this lane that is next."""
        priority = min((p for lane, p in self._lines if lane == is_long), default=None)
        if priority is None:
            return None
        lines = self._lines[is_long, priority]
        if len(lines) == 1:
            (line,) = lines.values()
        else:
            line = min(lines.items(), key=lambda item: self._turn(*item))[1]
        return next(iter(line))

    def take(self, seq: Sequence) -> None:
        """The sequence is looked at: from now on its place is behind all that were before it."""
        self._leave_line(seq)
        self._accounts[seq.request.account].started.add(seq)
        self._looks += 1
        seq.rank = (seq.request.priority, 0, self._looks)

    def was_taken(self, seq: Sequence) -> bool:
        return seq.rank[1] == 0

    def settle(self, seq: Sequence) -> None:
        """The sequence is gone, looked at or not."""
        account = self._accounts[seq.request.account]
        if self.was_taken(seq):
            account.started.remove(seq)
            account.ended += cost(seq)
        else:
            self._leave_line(seq)
        account.live -= 1
        if not any(other.live for other in self._accounts.values()):
            self._accounts.clear()

    def _turn(self, name: str, line: _Line) -> tuple[int, int]:
        return self._accounts[name].served, next(iter(line)).order

    def _leave_line(self, seq: Sequence) -> None:
        kind, name = (seq.is_long, seq.request.priority), seq.request.account
        lines = self._lines[kind]
        del lines[name][seq]
        if not lines[name]:
            del lines[name]
            if not lines:
                del self._lines[kind]
