"""Drafts for tests: the request's true continuation, with faults at places that follow from the sequence."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from lmdeploy.engine.batch import Batch, Masks, SampleColumns
from lmdeploy.engine.fake import FakeExecutor
from lmdeploy.engine.request import Request, Sequence
from lmdeploy.engine.speculation import Lead


class Guesses:
    """Proposer and policy in one: as many drafts as there is room for, right, wrong and poisonous ones.

    `truth` gives the tokens that a request yields without speculation.
    """

    num_kinds = 1

    def __init__(self, truth: Callable[[Request], list[int]], most: int, poison: int = 96) -> None:
        self._truth, self._most, self._poison = truth, most, poison
        self._known: dict[str, list[int]] = {}

    def find(self, seq: Sequence) -> Lead | None:
        return Lead(seq, 0) if (seq.length + seq.order) % 5 else None

    def propose(self, wanted: list[tuple[Lead, int]]) -> list[list[int]]:
        return [self._guess(lead.seq, count) for lead, count in wanted]

    def _guess(self, seq: Sequence, count: int) -> list[int]:
        name = seq.request.request_id
        if name not in self._known:
            self._known[name] = self._truth(seq.request)
        drafts = self._known[name][seq.num_output : seq.num_output + count]
        drafts += [0] * (count - len(drafts))
        fault = (3 * seq.length + seq.order) % (2 * self._most + 1)
        if fault < len(drafts):
            drafts[fault] = self._poison if fault % 3 == 0 else (drafts[fault] + 1) % self._poison
        return drafts[: count - (seq.length % 7 == 0)]

    def forget(self, seq: Sequence) -> None: ...

    def close(self) -> None: ...

    def ready(self, num_rows: int) -> bool:
        return True

    def lengths(self, leads: list[Lead], num_rows: int) -> list[int]:
        return [self._most] * len(leads)

    def settle(self, lead: Lead, drafted: int, accepted: int) -> None:
        assert 0 <= accepted <= drafted <= self._most

    def measure(self, *costs: float) -> None: ...


class Wavering(FakeExecutor):
    """Draws what a FakeExecutor draws, but for one token in three."""

    def _draw(self, s: SampleColumns, masks: Masks | None, i: int, state: int) -> int:
        token = super()._draw(s, masks, i, state)
        return token if state % 3 else (token + 1) % self.vocab_size


def count_drafts(batch: Batch) -> npt.NDArray[np.intp]:
    """Drafts in each row of a batch: its tokens behind the first at which a token is drawn."""
    drawing = batch.samples.token_index[batch.samples.target_ids < 0]
    rows = np.searchsorted(batch.row_start, drawing, side="right") - 1
    return np.maximum(np.bincount(rows, minlength=batch.num_rows) - 1, 0)
