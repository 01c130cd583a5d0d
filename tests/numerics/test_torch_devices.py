"""The torch executor's parts beside the CPU: tensors on the device "meta" have types and shapes, no values.

It stands for a card, in the tiles of one: an operation that mixes devices or types fails here as it would
there. Values need a card to be compared.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from native_llama import Case, gemma2, llama, qwen3

from lmdeploy.models.reference import Decoder
from lmdeploy.models.spec import AttentionSpec
from lmdeploy.pytorch.attention import BlockCache, Piece, attend_blocks
from lmdeploy.pytorch.plan import TILES

CARD = torch.device("meta")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", [lambda: llama(attention_bias=True), qwen3, gemma2])
def test_a_tile_stays_on_its_card(case: Callable[[], Case], dtype: torch.dtype) -> None:
    _, spec, tensors = case()
    tiles = TILES["cuda"]
    weights = {
        name: torch.empty(x.shape, device=CARD, dtype=dtype if len(x.shape) > 1 else torch.float32)
        for name, x in tensors.items()
    }
    cache = BlockCache(spec, 80, 16, dtype, CARD)
    ids = torch.zeros(tiles.rows, dtype=torch.int64, device=CARD)
    pieces = [Piece(0, 100, 1100, ids.new_zeros(75)), Piece(100, 101, 3, ids.new_zeros(1))]

    def attend(
        layer: int, a: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        cache.write(layer, ids[:101], ids[:101], k[:101], v[:101])
        parts = [attend_blocks(cache, layer, a, q[p.begin : p.end], p, tiles) for p in pieces]
        return torch.cat([*parts, parts[0].new_zeros(tiles.rows - 101, parts[0].shape[1])])

    decoder = Decoder(spec, weights)
    logits = decoder.logits(decoder.hidden(ids, ids, attend))
    assert logits.device == CARD
    assert logits.dtype == torch.float32
    assert logits.shape == (tiles.rows, spec.vocab_size)
