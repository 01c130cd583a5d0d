"""Long prompts in a lane of their own: what share of a step, of the rows and of the cache they may have.

Within these bounds both lanes move in every step, so that neither waits for the other: a short prompt is not
held up by the thousands of tokens before it, and a long one gets its share under any load. A long prompt that
alone needs more of the cache than the share is served all the same, one such at a time. Holds no state.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lmdeploy.engine.request import Sequence


@dataclass(frozen=True, slots=True)
class LaneOptions:
    """Where long prompts begin and what they may have."""

    threshold: int  # tokens; longer prompts are long
    step_share: float = 0.25  # of what prompts may add to a step, in tokens and in seconds
    cache_share: float = 0.5  # of rows and blocks


class LongLane:
    """The bounds of one engine."""

    def __init__(self, options: LaneOptions, max_rows: int, num_blocks: int) -> None:
        self.share = options.step_share
        self._threshold = options.threshold
        self._max_rows = max(1, int(max_rows * options.cache_share))
        self._max_blocks = int(num_blocks * options.cache_share)

    def takes(self, num_prompt: int) -> bool:
        return num_prompt > self._threshold

    def is_full(self, members: list[Sequence], found: list[int], need: int) -> bool:
        """Whether a newcomer with `found` cached blocks and `need` new ones is too much beside `members`."""
        return bool(members) and (len(members) >= self._max_rows or self._room(members, found) < need)

    def room_to_grow(self, members: list[Sequence]) -> int | None:
        """Blocks that `members` may still take between them; None: no bound, there is only one."""
        return self._room(members, []) if len(members) > 1 else None

    def _room(self, members: list[Sequence], found: list[int]) -> int:
        return self._max_blocks - held_blocks(members, found)

    def split(self, budget: int, long_first: bool) -> tuple[int, int]:
        """A step's prompt tokens for the short and for the long; whoever has the oldest gets one at least."""
        long = max(1, int(self.share * budget))
        if not long_first:
            long = min(long, budget - 1)
        return budget - long, long


def long_members(running: list[Sequence]) -> list[Sequence]:
    """Those in the long lane, in order."""
    return [seq for seq in running if seq.is_long]


def held_blocks(members: list[Sequence], more: list[int]) -> int:
    """How many blocks these sequences hold, those in `more` counted in; shared ones count once."""
    blocks = [seq.block_ids[: seq.num_blocks] for seq in members]
    return len(np.unique(np.concatenate([*blocks, np.array(more, np.int32)])))
