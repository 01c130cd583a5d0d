"""Whether a model whose description ties its matrices has an output matrix of its own in its files.

Knows stores, no family and no format. Reads the two matrices only when both are there, piece by piece.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lmdeploy.models.checkpoint import NameTable, Store
from lmdeploy.models.spec import ModelSpec
from lmdeploy.quant.tensors import GroupedTensor

_ROWS_AT_ONCE = 4096


def untied(spec: ModelSpec, store: Store, table: NameTable) -> tuple[ModelSpec, tuple[str, ...]]:
    """The spec that the files mean, and what is to be said of it: an output matrix unlike the embedding wins,
    as in transformers 5."""
    embed, head = table["embed.weight"].name, table["lm_head.weight"].name
    if not spec.tie_embeddings or not {embed, head} <= set(store.names()) or _equal(store, embed, head):
        return spec, ()
    note = f"tie_word_embeddings is true, but {head!r} is unlike {embed!r}: it is used"
    return replace(spec, tie_embeddings=False), (note,)


def _equal(store: Store, embed: str, head: str) -> bool:
    if store.info(embed).shape != store.info(head).shape:
        return False
    first, second = store.read(embed), store.read(head)
    if isinstance(first, GroupedTensor) or isinstance(second, GroupedTensor):
        return False
    return all(
        np.array_equal(
            first[i : i + _ROWS_AT_ONCE].astype(np.float32), second[i : i + _ROWS_AT_ONCE].astype(np.float32)
        )
        for i in range(0, len(first), _ROWS_AT_ONCE)
    )
