"""Which published block holds which prefix, and who is computing a prefix right now.

The key of a block is a 128-bit hash over the parent's key and its exact tokens; the parent of a first block
is the kind and text of the request's salt. A hit is believed only after comparing parent and tokens, so that
even a collision cannot hand a sequence the wrong keys and values. Knows no budget and decides no order.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from lmdeploy.engine.block_pool import BlockPool
from lmdeploy.engine.request import Sequence


def root_key(salt: str) -> bytes:
    """The parent of a request's first block: a kind tag, then the salt; other kinds get other tags."""
    return b"salt\0" + salt.encode()


def block_key(parent: bytes, tokens: bytes) -> bytes:
    """128-bit BLAKE2b (RFC 7693) over length and bytes of `parent`, then the block's tokens as int32."""
    return blake2b(len(parent).to_bytes(4, "little") + parent + tokens, digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Entry:
    """What a published block holds."""

    block: int
    parent: bytes
    tokens: bytes

    def holds(self, parent: bytes, tokens: bytes) -> bool:
        return self.parent == parent and self.tokens == tokens


class PrefixCache:
    """Maps prefixes to blocks of `pool`, which it owns. Unless `enabled`, nothing is found or published."""

    def __init__(self, num_blocks: int, block_size: int, enabled: bool = True) -> None:
        self.pool = BlockPool(num_blocks, self._forget)
        self.block_size = block_size
        self.enabled = enabled
        self._entries: dict[bytes, Entry] = {}
        self._key_of: dict[int, bytes] = {}
        self._computing: dict[bytes, Sequence] = {}

    def lookup(self, seq: Sequence) -> list[int] | None:
        """The published blocks that a waiting sequence can start from; takes no reference.

        None: an older sequence is computing the next block just now, so waiting beats computing it again.
        """
        if not self.enabled:
            return []
        if seq.wait_key is not None and self._computed_by_older(seq.wait_key, seq):
            return None
        usable = seq.reusable_tokens // self.block_size
        found = self._match(seq, usable)
        seq.wait_key = None
        if len(found) < usable and self._computed_by_older(self._key(seq, len(found)), seq):
            seq.wait_key = self._key(seq, len(found))
            return None
        return found

    def begin(self, seq: Sequence) -> None:
        """The sequence has got blocks and will compute all its full ones that are not published."""
        if self.enabled:
            for i in range(seq.num_published, seq.length // self.block_size):
                self._computing.setdefault(self._key(seq, i), seq)

    def end(self, seq: Sequence) -> None:
        """The sequence computes no more: it is finished or loses its blocks."""
        for key in seq.keys[seq.num_published :]:
            self._no_longer_computing(key, seq)

    def publish(self, seq: Sequence) -> None:
        """Offer the blocks that have become full and computed."""
        full = seq.num_computed // self.block_size
        if not self.enabled or full == seq.num_published:
            return
        for i in range(seq.num_published, full):
            key = self._key(seq, i)
            if key not in self._entries:
                block = int(seq.block_ids[i])
                self._entries[key] = Entry(block, self._parent(seq, i), self._tokens(seq, i))
                self._key_of[block] = key
                self.pool.publish(block)
            self._no_longer_computing(key, seq)
        seq.num_published = full

    def retract(self, seq: Sequence) -> None:
        """Withdraw every block of the sequence: its contents have turned out to be bad."""
        for block in seq.block_ids[: seq.num_blocks].tolist():
            if block in self._key_of:
                self._forget(block)
                self.pool.retract(block)

    def _match(self, seq: Sequence, usable: int) -> list[int]:
        found: list[int] = []
        for i in range(usable):
            entry = self._entries.get(self._key(seq, i))
            if entry is None or not entry.holds(self._parent(seq, i), self._tokens(seq, i)):
                break
            found.append(entry.block)
        return found

    def _key(self, seq: Sequence, index: int) -> bytes:
        for i in range(len(seq.keys), index + 1):
            seq.keys.append(block_key(self._parent(seq, i), self._tokens(seq, i)))
        return seq.keys[index]

    def _parent(self, seq: Sequence, index: int) -> bytes:
        return seq.keys[index - 1] if index else root_key(seq.request.cache_salt)

    def _tokens(self, seq: Sequence, index: int) -> bytes:
        tokens: bytes = seq.tokens[index * self.block_size : (index + 1) * self.block_size].tobytes()
        return tokens

    def _computed_by_older(self, key: bytes, seq: Sequence) -> bool:
        # Waiting for a younger one would turn the order round, and the other lane has a pace of its own.
        owner = self._computing.get(key)
        return owner is not None and owner.rank < seq.rank and owner.is_long == seq.is_long

    def _no_longer_computing(self, key: bytes, seq: Sequence) -> None:
        if self._computing.get(key) is seq:
            del self._computing[key]

    def _forget(self, block: int) -> None:
        del self._entries[self._key_of.pop(block)]
