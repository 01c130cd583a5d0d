"""Keys and values in cache blocks, and attention that gathers them.

Knows blocks, positions and one sequence at a time; no batch and no request. Shapes are those of `plan.Tiles`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lmdeploy.models.reference import each_value, masked_scores, visible
from lmdeploy.models.spec import AttentionSpec, ModelSpec
from lmdeploy.pytorch.plan import Tiles
from lmdeploy.pytorch.rounded_cache import RoundedCache

_BELOW_ALL = -1e30  # under any score, and finite: differences stay numbers where nothing was visible yet


class BlockCache:
    """Per layer keys and values [kv_heads, num_blocks, block_size, head_dim], all taken at once."""

    def __init__(
        self, spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size = block_size
        shapes = [
            (x.attention.num_kv_heads, num_blocks, block_size, x.attention.head_dim) for x in spec.layers
        ]
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]

    def tensors(self) -> list[torch.Tensor]:
        """Everything that is kept."""
        return [*self.keys, *self.values]

    def turn(self, q: torch.Tensor) -> torch.Tensor:
        """Queries as they meet the keys that `read` returns."""
        return q

    def turn_back(self, mixed: torch.Tensor) -> torch.Tensor:
        """Mixes of the values that `read` returns, as the model knows them."""
        return mixed

    def write(
        self, layer: int, blocks: torch.Tensor, offsets: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """k, v float32 [tokens, kv_heads, head_dim] to places int64 [tokens]."""
        for cache, new in ((self.keys[layer], k), (self.values[layer], v)):
            cache[:, blocks, offsets] = new.transpose(0, 1).to(cache.dtype)

    def read(
        self, layer: int, blocks: torch.Tensor, count: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `count` tokens in `blocks` as float32 [kv_heads, width, head_dim], zeros after them."""
        return self._gather(self.keys[layer], blocks, count, width), self._gather(
            self.values[layer], blocks, count, width
        )

    @staticmethod
    def _gather(cache: torch.Tensor, blocks: torch.Tensor, count: int, width: int) -> torch.Tensor:
        heads, _, _, head_dim = cache.shape
        found = cache[:, blocks].view(heads, -1, head_dim)
        result = torch.zeros(heads, width, head_dim, dtype=torch.float32, device=cache.device)
        result[:, :count] = found[:, :count]
        return result


Cache = BlockCache | RoundedCache


def make_cache(
    spec: ModelSpec, num_blocks: int, block_size: int, bits: int, dtype: torch.dtype, device: torch.device
) -> Cache:
    """bits: 8 or 4, or 16 for a cache in `dtype`."""
    if bits == 16:
        return BlockCache(spec, num_blocks, block_size, dtype, device)
    return RoundedCache(spec, num_blocks, block_size, bits, device)


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [begin, end) of a tile: neighbours in one sequence, the first at `position`."""

    begin: int
    end: int
    position: int
    blocks: torch.Tensor  # int64, the sequence's cache blocks from its start


def attend_blocks(
    cache: Cache, layer: int, a: AttentionSpec, q: torch.Tensor, piece: Piece, tiles: Tiles
) -> torch.Tensor:
    """Mixed values float32 [tokens, heads * head_dim] of a piece's queries q [tokens, heads, head_dim].

    The piece's own keys and values are in the cache already.
    """
    parts, q = [], cache.turn(q)
    for begin in range(0, len(q), tiles.queries):
        some = q[begin : begin + tiles.queries]
        first = piece.position + begin
        positions = torch.arange(first, first + tiles.queries, device=q.device)
        parts.append(_attend_tile(cache, layer, a, some, positions, piece, tiles))
    return torch.cat(parts)


def _attend_tile(
    cache: Cache,
    layer: int,
    a: AttentionSpec,
    q: torch.Tensor,
    positions: torch.Tensor,
    piece: Piece,
    tiles: Tiles,
) -> torch.Tensor:
    heads, group = a.num_kv_heads, a.num_heads // a.num_kv_heads
    query = q.new_zeros(heads, group, tiles.queries, a.head_dim)
    query[:, :, : len(q)] = q.view(len(q), heads, group, a.head_dim).permute(1, 2, 0, 3)
    query = query.view(heads, group * tiles.queries, a.head_dim)
    length = piece.position + piece.end - piece.begin
    top = torch.full_like(query[..., :1], _BELOW_ALL)
    sums = Sums(top, torch.zeros_like(top), torch.zeros_like(query))
    for start in range(_first_range(piece.position, a.window, tiles.keys), length, tiles.keys):
        count = min(length - start, tiles.keys)
        blocks = piece.blocks[start // cache.block_size : -(-(start + count) // cache.block_size)]
        keys, values = cache.read(layer, blocks, count, tiles.keys)
        places = torch.arange(start, start + tiles.keys, device=q.device)
        seen = visible(positions, places, a.window).repeat(group, 1)
        sums = _add(sums, masked_scores(query, keys, a, seen), values)
        del keys, values  # else they live until the next ones are read
    mixed = (sums.mixed / sums.total).view(heads, group, tiles.queries, a.head_dim)
    return cache.turn_back(mixed[:, :, : len(q)].permute(2, 0, 1, 3)).reshape(len(q), -1)


@dataclass(frozen=True, slots=True)
class Sums:
    """Of the keys so far: largest score, sum of exp(score - largest), and values weighted with it."""

    top: torch.Tensor  # [heads, queries, 1]
    total: torch.Tensor
    mixed: torch.Tensor  # [heads, queries, head_dim]


def _add(sums: Sums, scores: torch.Tensor, values: torch.Tensor) -> Sums:
    """Softmax with a running maximum (Milakov and Gimelshein 2018).

    Keys that a query does not see leave its sums as they were, bit for bit.
    """
    top = torch.maximum(sums.top, scores.amax(-1, keepdim=True))
    weights, kept = each_value(torch.exp, scores - top), each_value(torch.exp, sums.top - top)
    return Sums(top, sums.total * kept + weights.sum(-1, keepdim=True), sums.mixed * kept + weights @ values)


def _first_range(position: int, window: int | None, keys: int) -> int:
    """Where the first range begins that any token from `position` on sees."""
    return 0 if window is None else max(position - window + 1, 0) // keys * keys
