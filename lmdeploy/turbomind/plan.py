"""What the native engine takes of memory, in bytes, before any weight is read.

Counts what csrc/workspace.cpp, csrc/model.cpp and csrc/pack.cpp take, from a spec, tensor headers and limits.
A test compares every figure with what a loaded model took. Knows no machine and no policy.
"""

from __future__ import annotations

from dataclasses import dataclass

from lmdeploy.engine.executor import Limits
from lmdeploy.models.spec import LayerSpec, ModelSpec, RopeSpec
from lmdeploy.turbomind.accuracy import Accuracy
from lmdeploy.turbomind.layout import TILE, Headers, LayerLayout, ModelLayout, align, ceil_div, model_layout

FEW_ROWS, ROW_CHUNK, UNIT_TILES, TILE_ROWS, SPLIT = (
    4,
    128,
    8,
    16,
    512,
)  # csrc/workspace.h, csrc/kernels/table.h
LOGIT_BYTES = 16 << 20
_QUERY_TILE_BYTES = 16


@dataclass(frozen=True, slots=True)
class NativePlan:
    """Bytes: packed weights, workspace, and one cache block over all layers."""

    weights: int
    workspace: int
    block: int


def native_plan(
    spec: ModelSpec, headers: Headers, limits: Limits, accuracy: Accuracy = "exact", dtype: str = "auto"
) -> NativePlan:
    """Exact needs of one model. ModelError when the native engine cannot compute it."""
    layout = model_layout(spec, headers, accuracy, dtype)
    block = kv_token_bytes(spec, limits.kv_bits) * limits.block_size
    return NativePlan(layout.nbytes, workspace_bytes(spec, layout, limits), block)


def kv_token_bytes(spec: ModelSpec, bits: int) -> int:
    """Keys and values of one token in all layers: codes, and scales (below 16 bits offsets too) of each head.

    With 4 bits the dimensions of a value come in runs of 32 (csrc/kv_layer.cpp).
    """
    factors = 2 * (2 if bits == 16 else 4)
    total = 0
    for layer in spec.layers:
        a = layer.attention
        value = ceil_div(a.head_dim, 32) * 32 if bits == 4 else a.head_dim
        total += a.num_kv_heads * ((a.head_dim + value) * bits // 8 + factors)
    return total


def workspace_bytes(spec: ModelSpec, layout: ModelLayout, limits: Limits) -> int:
    """Everything a step writes apart from the cache."""
    return _shared_bytes(spec, layout, limits) + limits.num_threads * _thread_bytes(spec, layout, limits)


def _shared_bytes(spec: ModelSpec, layout: ModelLayout, limits: Limits) -> int:
    tokens, hidden = limits.max_step_tokens, spec.hidden_size
    stride = ceil_div(spec.vocab_size, TILE) * TILE
    logit_rows = min(max(LOGIT_BYTES // (4 * stride), 1), tokens)
    ropes = sum(rope.rotary_dim // 2 for rope in rope_kinds(spec))
    contexts = 2 * limits.num_threads * ceil_div(limits.max_context, SPLIT)
    heads = max(_group_heads(x) for x in spec.layers)
    values = max(_group_heads(x) * x.attention.head_dim for x in spec.layers)
    sizes = [
        4 * tokens * hidden,
        4 * tokens * hidden * any(x.post_norm for x in spec.layers),
        *[4 * tokens * _q_dim(spec)] * 2,
        4 * tokens * max(_kv_across(x) for x in spec.layers),
        *[4 * tokens * ropes] * 2,
        _input_bytes(layout, tokens),
        max(x.down.input.nbytes(tokens) for x in layout.layers),
        4 * logit_rows * stride,
        logit_rows,
        4 * contexts * values,
        *[4 * contexts * heads] * 2,
        4 * contexts,
        _QUERY_TILE_BYTES * tokens,
        4 * tokens,
    ]
    return sum(align(size) for size in sizes)


def _thread_bytes(spec: ModelSpec, layout: ModelLayout, limits: Limits) -> int:
    q_dim = _q_dim(spec)
    rows = min(ROW_CHUNK, ceil_div(limits.max_step_tokens, 8) * 8)
    widest = max(2 * UNIT_TILES * TILE, *(2 * x.attention.head_dim for x in spec.layers))
    deepest = max(spec.hidden_size, q_dim, *(x.ffn.intermediate_size for x in spec.layers))
    vectors = max(_tile_vectors(x) for x in spec.layers)
    tile_values = max(_tile_vectors(x) * x.attention.head_dim for x in spec.layers)
    sizes = [
        _input_bytes(layout, FEW_ROWS),
        *[4 * max(spec.hidden_size, q_dim)] * 2,
        4 * rows * widest,
        matmul_scratch(deepest),
        *[4 * tile_values, 4 * vectors, 4 * vectors] * 2,
        *[4 * spec.vocab_size] * 3,
    ]
    return sum(align(size) for size in sizes)


def matmul_scratch(inputs: int) -> int:
    """Room for the matmul kernel of any instruction set; csrc/workspace.cpp checks that it is enough."""
    return 64 * ceil_div(inputs, 128) * 128 + (64 << 10)


def rope_kinds(spec: ModelSpec) -> list[RopeSpec]:
    """The distinct rotary embeddings of a model, in order of first use."""
    return list(dict.fromkeys(x.attention.rope for x in spec.layers if x.attention.rope is not None))


def _q_dim(spec: ModelSpec) -> int:
    return max(x.attention.num_heads * x.attention.head_dim for x in spec.layers)


def _kv_across(layer: LayerSpec) -> int:
    """Keys and values of a token that wait for a norm across heads."""
    a = layer.attention
    return 2 * a.num_kv_heads * a.head_dim if a.qk_norm_across_heads else 0


def _group_heads(layer: LayerSpec) -> int:
    return layer.attention.num_heads // layer.attention.num_kv_heads


def _tile_vectors(layer: LayerSpec) -> int:
    return max(1, TILE_ROWS // _group_heads(layer)) * _group_heads(layer)


def _input_bytes(layout: ModelLayout, rows: int) -> int:
    """The widest of all inputs but that of down_proj."""

    def widest(layer: LayerLayout) -> int:
        return max(x.input.nbytes(rows) for x in (layer.qkv, layer.o, layer.gate_up))

    return max(layout.head_input.nbytes(rows), *(widest(layer) for layer in layout.layers))
