"""Guided decoding: which tokens may come next where an answer must be a text of a grammar.

Owns who waits for a grammar to be compiled, and the masks of a step: which sample they are for and that they
are there when it draws. Grammars themselves, and the threads they are compiled and followed on, belong to
whoever implements `Grammars`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from lmdeploy.engine.batch import U32, Masks, Row
from lmdeploy.engine.request import Grammar, Guide, Sequence
from lmdeploy.errors import RequestError

_SECONDS = 0.01  # that a step without rows waits for a grammar, so that its owner soon looks for commands

Job = tuple[
    Guide, int, list[int]
]  # whose masks, the row of the first one, drafts that have one each behind it


class Compilation(Protocol):
    """A grammar on its way."""

    def done(self) -> bool: ...

    def guide(self) -> Guide:
        """At the beginning of the grammar. Raises RequestError when that cannot be followed."""
        ...


class Grammars(Protocol):
    """Compiles grammars for one vocabulary, beside the steps of the engine."""

    def compile(self, grammar: Grammar) -> Compilation:
        """Begin, or find it compiled already."""
        ...

    def wait(self, compilations: list[Compilation], seconds: float) -> None:
        """Return when one of them is done or the time is over."""
        ...

    def fill(self, jobs: list[Job], bits: U32) -> Callable[[], None]:
        """Begin to write masks; what is returned waits until they are written. Neither raises: a guide that
        cannot go on says so in `error`."""
        ...

    def close(self) -> None: ...


class Guides:
    """The guided sequences of one engine. `vocab_size` in tokens."""

    def __init__(self, grammars: Grammars, vocab_size: int) -> None:
        self._grammars = grammars
        self._width = -(-vocab_size // 32)
        self._waiting: dict[Sequence, Compilation] = {}

    def begin(self, seq: Sequence, grammar: Grammar) -> None:
        """Have the grammar compiled; `seq` comes out of `ready` when it is."""
        self._waiting[seq] = self._grammars.compile(grammar)

    def forget(self, seq: Sequence) -> bool:
        """Whether the sequence, which has ended, was still waiting."""
        return self._waiting.pop(seq, None) is not None

    def ready(self) -> Iterator[tuple[Sequence, RequestError | None]]:
        """Sequences that wait no longer: with their guide, or with what is wrong with their grammar."""
        for seq in [s for s, compilation in self._waiting.items() if compilation.done()]:
            try:
                seq.guide = self._waiting[seq].guide()
            except RequestError as error:
                yield seq, error  # `forget` is for its end
            else:
                del self._waiting[seq]
                yield seq, None

    def wait(self) -> None:
        """Nothing but grammars is being worked on: wait a moment for one."""
        if self._waiting:
            self._grammars.wait(list(self._waiting.values()), _SECONDS)

    def masks(self, rows: list[Row]) -> Masks | None:
        """Masks of the samples of these rows, in the order in which a batch has them; None: all are free."""
        if all(seq.guide is None for seq, _ in rows):
            return None
        index: list[int] = []
        jobs: list[Job] = []
        count = 0
        for seq, num_new in rows:
            index += [-1] * len(seq.scored_positions(num_new))
            draws = seq.num_draws(num_new)
            if seq.guide is None or not draws:
                index += [-1] * draws
                continue
            jobs.append((seq.guide, count, seq.tokens[seq.length : seq.length + draws - 1].tolist()))
            index += range(count, count + draws)
            count += draws
        if not jobs:
            return None
        bits = np.zeros((count, self._width), np.uint32)
        return Masks(np.array(index, np.int32), bits, self._grammars.fill(jobs, bits))

    def close(self) -> None:
        self._grammars.close()
