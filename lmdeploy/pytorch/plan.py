"""What the torch executor takes of memory, in bytes, before any weight is read; the shapes it computes in.

Counts from a spec and limits alone: weights are dequantised, so headers change nothing. A test compares the
figures with what a loaded executor took. Knows no machine and no policy; imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lmdeploy.errors import ModelError
from lmdeploy.models.spec import LayerSpec, ModelSpec

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
VECTOR_BYTES = 4  # norms, biases and activations are float32
_SMALL = 256 << 10  # bytes: positions, masks, angles, padding of short pieces


@dataclass(frozen=True, slots=True)
class Tiles:
    """Every step is cut into `rows` tokens, attention into `queries` tokens by `keys` cached ones.

    What is missing of a tile is padded, so that each operation has one shape whatever the batch is: libraries
    choose the order of their sums by shape, and a sequence must not depend on its neighbours.
    """

    rows: int
    queries: int
    keys: int  # a multiple of every block size


# A card needs many rows at once to be busy; on a CPU more rows than these only cost where few are decoded.
TILES: Mapping[str, Tiles] = {"cpu": Tiles(16, 8, 256), "cuda": Tiles(128, 16, 1024)}


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """Bytes: weights, workspace (largest total of tensors alive in a step), one cache block of all layers."""

    weights: int
    workspace: int
    block: int


def torch_plan(spec: ModelSpec, dtype: str, device: str, block_size: int, kv_bits: int = 16) -> TorchPlan:
    """Needs of one model. ModelError when the torch executor cannot compute it.

    kv_bits: 8 or 4, or 16 for a cache in `dtype`.
    """
    for layer in spec.layers:
        _check_supported(layer)
    size = DTYPE_BYTES[dtype]
    weights = sum(math.prod(s) * (size if len(s) > 1 else VECTOR_BYTES) for _, s in spec.tensors())
    token = spec.kv_bytes_per_token(size) if kv_bits == 16 else _rounded_token(spec, kv_bits)
    return TorchPlan(weights, _workspace(spec, size, TILES[device], kv_bits), token * block_size)


def _rounded_token(spec: ModelSpec, bits: int) -> int:
    """Codes, and a scale and an offset in bfloat16 for each key and value of a head."""
    factors = sum(2 * 4 * x.attention.num_kv_heads for x in spec.layers)
    return spec.kv_bytes_per_token(1) * bits // 8 + factors


def _check_supported(layer: LayerSpec) -> None:
    a = layer.attention
    if layer.ffn.kind != "gated":
        raise ModelError(
            f"a feed-forward block of kind {layer.ffn.kind!r} is not supported by the PyTorch engine"
            " (supported: gated)"
        )
    if a.num_heads % a.num_kv_heads:
        raise ModelError(
            f"{a.num_heads} query heads over {a.num_kv_heads} key/value heads are not supported by the"
            " PyTorch engine (supported: a whole number of query heads for each)"
        )


def _workspace(spec: ModelSpec, size: int, tiles: Tiles, kv_bits: int) -> int:
    """Tensors alive at once in the widest of attention, feed-forward block and head, each counted in copies.

    An elementwise function over padded pieces holds four copies of its argument (`reference.each_value`);
    matrices of a 16-bit type hold their input and output in that type too.
    """
    rows, narrow = tiles.rows, size if size < VECTOR_BYTES else 0
    stages = [_head_bytes(spec, tiles, narrow)]
    for layer in set(spec.layers):
        stages.append(_attention_bytes(layer, tiles, size, kv_bits))
        stages.append(rows * layer.ffn.intermediate_size * (5 * VECTOR_BYTES + narrow))
    return rows * spec.hidden_size * (5 * VECTOR_BYTES + 2 * narrow) + max(stages) + _SMALL


def _head_bytes(spec: ModelSpec, tiles: Tiles, narrow: int) -> int:
    """Logits of a tile, and what drawing one token takes: six float64 or int64 arrays of the vocabulary."""
    copies = 2 if spec.logit_softcap is None else 5
    return spec.vocab_size * (tiles.rows * (copies * VECTOR_BYTES + narrow) + 6 * 8)


def _attention_bytes(layer: LayerSpec, tiles: Tiles, size: int, kv_bits: int) -> int:
    a = layer.attention
    scores = a.num_heads * tiles.queries * tiles.keys * VECTOR_BYTES
    copies = 5 if a.softcap is None else 6
    keys = a.num_kv_heads * tiles.keys * a.head_dim
    new = tiles.rows * (3 * a.num_heads + 4 * a.num_kv_heads) * a.head_dim * VECTOR_BYTES
    queries = 5 * a.num_heads * tiles.queries * a.head_dim * VECTOR_BYTES
    gathered = size if kv_bits == 16 else 2  # codes as they lie in the cache, and one by one
    return copies * scores + keys * (2 * VECTOR_BYTES + gathered) + new + queries
