"""Where tensors are found in files, and in which order their rows stand there: tables families start from.

Knows the usual spellings of Hugging Face and GGUF files; a family adds or replaces rows of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lmdeploy.models.checkpoint import NameTable, Rows, Source
from lmdeploy.models.spec import AttentionSpec, ModelSpec

RowOrder = Callable[[ModelSpec, int], Rows]  # given the spec and the layer number
_KINDS = ("weight", "bias")


def layer_names(prefix: str, parts: dict[str, str | tuple[str, RowOrder]]) -> dict[str, Source]:
    """Sources of weight and bias for canonical parts of a layer; `prefix` holds {i}."""
    table = {}
    for part, found in parts.items():
        name, rows = (found, None) if isinstance(found, str) else found
        for kind in _KINDS:
            table[f"layers.{{i}}.{part}.{kind}"] = Source(f"{prefix}{name}.{kind}", rows)
    return table


def either(table: NameTable, otherwise: NameTable) -> NameTable:
    """The same parts in one of two places."""
    return {key: replace(source, otherwise=otherwise[key]) for key, source in table.items()}


def pairs_apart(heads_of: Callable[[AttentionSpec], int]) -> RowOrder:
    """Rows whose rotary pairs are stored as (2d, 2d + 1), brought to (d, d + rotary_dim / 2).

    Values that are not turned stay; a layer without rotation keeps the order of the file, which any order of
    queries and keys alike may be.
    """

    def rows(spec: ModelSpec, layer: int) -> npt.NDArray[np.intp]:
        a = spec.layers[layer].attention
        stored = np.arange(heads_of(a) * a.head_dim, dtype=np.intp).reshape(heads_of(a), a.head_dim)
        turned = a.rope.rotary_dim if a.rope else 0
        parts = (stored[:, 0:turned:2], stored[:, 1:turned:2], stored[:, turned:])
        return np.ravel(np.concatenate(parts, 1))

    return rows


Q_PAIRS_APART, K_PAIRS_APART = pairs_apart(lambda a: a.num_heads), pairs_apart(lambda a: a.num_kv_heads)


def stacked_qkv(part: int) -> RowOrder:
    """All queries, then all keys, then all values; part 0, 1 or 2."""

    def rows(spec: ModelSpec, layer: int) -> slice:
        a = spec.layers[layer].attention
        ends = np.cumsum(
            [0, *(heads * a.head_dim for heads in (a.num_heads, a.num_kv_heads, a.num_kv_heads))]
        )
        return slice(int(ends[part]), int(ends[part + 1]))

    return rows


def stacked_pairs_apart(part: int) -> RowOrder:
    """Queries (part 0) or keys (1) of `stacked_qkv`, their pairs brought to (d, d + rotary_dim / 2)."""

    def rows(spec: ModelSpec, layer: int) -> npt.NDArray[np.intp]:
        start = spec.layers[layer].attention.num_heads * spec.layers[layer].attention.head_dim if part else 0
        return np.asarray((Q_PAIRS_APART, K_PAIRS_APART)[part](spec, layer)) + start

    return rows


def grouped_qkv(part: int) -> RowOrder:
    """For each key head its queries, then the key, then the value; part 0, 1 or 2."""

    def rows(spec: ModelSpec, layer: int) -> npt.NDArray[np.intp]:
        a = spec.layers[layer].attention
        group = a.num_heads // a.num_kv_heads
        shape = a.num_kv_heads, group + 2, a.head_dim
        stored = np.arange(np.prod(shape), dtype=np.intp).reshape(shape)
        return np.ravel((stored[:, :group], stored[:, group], stored[:, group + 1])[part])

    return rows


def stacked_halves(part: int) -> RowOrder:
    """Gate (part 0), then up (part 1)."""

    def rows(spec: ModelSpec, layer: int) -> slice:
        size = spec.layers[layer].ffn.intermediate_size
        return slice(part * size, (part + 1) * size)

    return rows


HF_LAYER = "model.layers.{i}."
HF_NAMES: NameTable = {
    "embed.weight": Source("model.embed_tokens.weight"),
    "norm.weight": Source("model.norm.weight"),
    "lm_head.weight": Source("lm_head.weight"),
    **layer_names(
        HF_LAYER,
        {
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "attn.q_proj": "self_attn.q_proj",
            "attn.k_proj": "self_attn.k_proj",
            "attn.v_proj": "self_attn.v_proj",
            "attn.o_proj": "self_attn.o_proj",
            "attn.q_norm": "self_attn.q_norm",
            "attn.k_norm": "self_attn.k_norm",
            "ffn.gate_proj": "mlp.gate_proj",
            "ffn.up_proj": "mlp.up_proj",
            "ffn.down_proj": "mlp.down_proj",
        },
    ),
}


def text_part(
    table: NameTable, present: Iterable[str], ignored: Callable[[str], bool]
) -> tuple[NameTable, Callable[[str], bool]]:
    """For a language model that is a part of a whole: its table, and what of the files is not read.

    ignored: by the model's own names. Files have the part in front of these, or behind the first "model." as
    transformers writes it since 4.52.
    """
    part = "language_model."
    before = any(name.startswith(part) for name in present)
    inside = (part,) if before else (f"model.{part}", "lm_head.")

    def placed(name: str) -> str:
        if before:
            return part + name
        return f"model.{part}{name[6:]}" if name.startswith("model.") else name

    def unread(name: str) -> bool:
        return not name.startswith(inside) or ignored(name.replace(part, "", 1))

    return {key: replace(source, name=placed(source.name)) for key, source in table.items()}, unread


HF_FUSED_GATE_UP = layer_names(
    HF_LAYER,
    {
        "ffn.gate_proj": ("mlp.gate_up_proj", stacked_halves(0)),
        "ffn.up_proj": ("mlp.gate_up_proj", stacked_halves(1)),
    },
)

GGUF_LAYER = "blk.{i}."
GGUF_NAMES: NameTable = {
    "embed.weight": Source("token_embd.weight"),
    "norm.weight": Source("output_norm.weight"),
    "lm_head.weight": Source("output.weight"),
    **layer_names(
        GGUF_LAYER,
        {
            "attn_norm": "attn_norm",
            "ffn_norm": "ffn_norm",
            "attn_post_norm": "post_attention_norm",
            "ffn_post_norm": "post_ffw_norm",
            "attn.q_proj": "attn_q",
            "attn.k_proj": "attn_k",
            "attn.v_proj": "attn_v",
            "attn.o_proj": "attn_output",
            "attn.q_norm": "attn_q_norm",
            "attn.k_norm": "attn_k_norm",
            "ffn.gate_proj": "ffn_gate",
            "ffn.up_proj": "ffn_up",
            "ffn.down_proj": "ffn_down",
        },
    ),
}
# llama.cpp turns neighbouring values in the architectures that began as Llama.
GGUF_PAIRS_APART = layer_names(
    GGUF_LAYER, {"attn.q_proj": ("attn_q", Q_PAIRS_APART), "attn.k_proj": ("attn_k", K_PAIRS_APART)}
)
# Some converters write queries, keys and values of these as one matrix.
GGUF_QKV_OR_PAIRS_APART = either(
    {**GGUF_PAIRS_APART, **layer_names(GGUF_LAYER, {"attn.v_proj": "attn_v"})},
    layer_names(
        GGUF_LAYER,
        {
            "attn.q_proj": ("attn_qkv", stacked_pairs_apart(0)),
            "attn.k_proj": ("attn_qkv", stacked_pairs_apart(1)),
            "attn.v_proj": ("attn_qkv", stacked_qkv(2)),
        },
    ),
)
GGUF_FUSED_GATE_UP = layer_names(
    GGUF_LAYER,
    {"ffn.gate_proj": ("ffn_up", stacked_halves(0)), "ffn.up_proj": ("ffn_up", stacked_halves(1))},
)
