"""Which cache blocks are free, held or cached, and in which order cached ones are given up.

free    nobody refers to it and its contents mean nothing
held    one or more sequences refer to it
cached  nobody refers to it, but it is published: its contents can be taken up again, or evicted

Knows block numbers only: no tokens, no hashes, no sequences.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


class BlockPool:
    """Reference counts over `num_blocks` blocks; free + held + cached is always `num_blocks`.

    `on_evict` is called with each cached block that is about to be reused for something else.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None]) -> None:
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._refs = [0] * num_blocks
        self._published = [False] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently held first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out."""
        return len(self._free) + len(self._cached)

    def is_held(self, block: int) -> bool:
        return self._refs[block] > 0

    def allocate(self, count: int) -> list[int]:
        """`count` blocks, each with one reference: free ones, then the least recently used cached ones."""
        assert count <= self.num_available, "allocate() beyond num_available"
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._published[block] = False
            self._on_evict(block)
        self._refs[block] = 1
        return block

    def retain(self, blocks: Iterable[int]) -> None:
        """Add a reference to held or cached blocks."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._cached[block]
            self._refs[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Drop a reference of each block of one sequence, given first block first.

        The last block goes first, so that a prefix outlives what builds on it.
        """
        for block in reversed(blocks):
            assert self._refs[block] > 0, "release() of a block nobody holds"
            self._refs[block] -= 1
            if self._refs[block] > 0:
                continue
            if self._published[block]:
                self._cached[block] = None
            else:
                self._free.append(block)

    def publish(self, block: int) -> None:
        """From now on the block is cached, not free, when its last holder leaves."""
        assert self._refs[block] > 0, "publish() of a block nobody holds"
        self._published[block] = True

    def retract(self, block: int) -> None:
        """Undo `publish`: the contents must not be taken up again."""
        self._published[block] = False
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def check(self) -> None:
        """Assert every invariant; takes time proportional to the pool, for tests."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & self._cached.keys(), "a block is both free and cached"
        for block, refs in enumerate(self._refs):
            assert refs >= 0, "negative reference count"
            assert (refs == 0) == (block in free or block in self._cached), "held and free or cached at once"
            assert (block in self._cached) == (refs == 0 and self._published[block]), (
                "published but not cached"
            )
        assert self.num_free + self.num_held + self.num_cached == self.num_blocks
