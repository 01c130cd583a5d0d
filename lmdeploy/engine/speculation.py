"""Speculative decoding: rows go on with drafts, tokens that may come next, so that a step brings several.

The executor draws a token at the last real token and at each draft, each with the random numbers of its own
position. A draft is right while it is the very token drawn in its place, so an answer is the same with and
without drafts, bit for bit; only the steps it takes differ. Owns the order of things within a step. Where
drafts come from is a `Proposer`'s business, how many are worth computing a `Policy`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from lmdeploy.engine.batch import Batch, Row
from lmdeploy.engine.request import Sequence
from lmdeploy.engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Lead:
    """That drafts for a sequence can be had. Those of one `kind` are about equally often right."""

    seq: Sequence
    kind: int
    place: int = 0  # the proposer's own note


class Proposer(Protocol):
    """Where drafts come from."""

    num_kinds: int

    def find(self, seq: Sequence) -> Lead | None:
        """Whether there may be drafts to follow the last token; costs next to nothing."""
        ...

    def propose(self, wanted: list[tuple[Lead, int]]) -> list[list[int]]:
        """At most so many drafts for each lead of this step."""
        ...

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended."""
        ...

    def close(self) -> None:
        """Free what proposals are made with."""
        ...


class Policy(Protocol):
    """How many drafts are worth their computing."""

    def ready(self, num_rows: int) -> bool:
        """Whether the step may have drafts at all; called once before each step of decode rows."""
        ...

    def lengths(self, leads: list[Lead], num_rows: int) -> list[int]:
        """Most drafts for each lead, in a step of `num_rows` sequences."""
        ...

    def settle(self, lead: Lead, drafted: int, accepted: int) -> None:
        """What came of a lead that was followed."""
        ...

    def measure(
        self, num_rows: int, num_drafts: int, deepest: int, drafting: float, computing: float
    ) -> None:
        """Seconds that a step of decode rows took: finding drafts, at most `deepest` for one sequence, and
        computing all."""
        ...


class Speculation:
    """Extends steps of decode rows by drafts. `clock` gives seconds; without one no step is measured."""

    def __init__(self, proposer: Proposer, policy: Policy, clock: Callable[[], float] | None = None) -> None:
        self._proposer = proposer
        self._policy = policy
        self._clock = clock
        self._followed: dict[Sequence, Lead] = {}
        self._decoding = False  # whether the step in progress has decode rows alone
        self._deepest = 0  # drafts of one sequence in it
        self._drafting = 0.0  # seconds it took to find them

    def extend(self, rows: list[Row], scheduler: Scheduler) -> list[Row]:
        """The planned rows, with drafts where they pay. Steps that compute prompts stay as they are."""
        self._followed.clear()
        self._decoding = all(n == 1 and seq.length - seq.num_computed == 1 for seq, n in rows)
        self._deepest, self._drafting = 0, 0.0
        if not self._decoding or not self._policy.ready(len(rows)):
            return rows
        began = self._clock() if self._clock else 0.0
        counts = self._draft([seq for seq, _ in rows], scheduler)
        self._deepest = max(counts.values(), default=0)
        self._drafting = self._clock() - began if self._clock else 0.0
        return [(seq, n + counts.get(seq, 0)) for seq, n in rows] if counts else rows

    def _draft(self, seqs: list[Sequence], scheduler: Scheduler) -> dict[Sequence, int]:
        """Put drafts behind sequences; how many each has got."""
        leads = [lead for seq in seqs if (lead := self._proposer.find(seq)) is not None]
        if not leads:
            return {}
        room, wanted = scheduler.max_tokens - len(seqs), []
        for lead, length in zip(leads, self._policy.lengths(leads, len(seqs)), strict=True):
            if length and (count := scheduler.room_for_drafts(lead.seq, min(length, room))):
                wanted.append((lead, count))
                room -= count
        counts = {}
        for (lead, _), drafts in zip(wanted, self._proposer.propose(wanted) if wanted else [], strict=True):
            if lead.seq.guide is not None:
                drafts = drafts[: lead.seq.guide.fitting(drafts)]
            if drafts:
                lead.seq.put_drafts(drafts)
                counts[lead.seq] = len(drafts)
                self._followed[lead.seq] = lead
        return counts

    @contextmanager
    def measured(self, batch: Batch) -> Iterator[None]:
        """Around the computing of a step that went through `extend`."""
        began = self._clock() if self._clock else 0.0
        yield
        if self._clock and self._decoding:
            seconds = self._clock() - began
            drafts = batch.num_tokens - batch.num_rows
            self._policy.measure(batch.num_rows, drafts, self._deepest, self._drafting, seconds)

    def settle(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """What came of the drafts of a sequence in this step."""
        self._policy.settle(self._followed[seq], drafted, accepted)

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended."""
        self._proposer.forget(seq)

    def close(self) -> None:
        """Free what drafts are made with."""
        self._proposer.close()
