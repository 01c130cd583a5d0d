"""Phi-3, Phi-3.5 and Phi-4-mini: fused matrices, longrope, on Phi-4-mini over a part of each head."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lmdeploy.errors import ModelError
from lmdeploy.models.checkpoint import NameTable
from lmdeploy.models.families.base import Family, activation, gguf_rope, gguf_sizes, hf_sizes, window
from lmdeploy.models.families.names import (
    GGUF_FUSED_GATE_UP,
    GGUF_LAYER,
    GGUF_NAMES,
    HF_FUSED_GATE_UP,
    HF_LAYER,
    HF_NAMES,
    layer_names,
    stacked_qkv,
)
from lmdeploy.models.fields import Fields
from lmdeploy.models.gguf import GGUFFile
from lmdeploy.models.spec import FfnSpec, LayerSpec, ModelSpec, RopeSpec


def _fused(prefix: str, name: str) -> NameTable:
    return layer_names(
        prefix, {f"attn.{part}_proj": (name, stacked_qkv(i)) for i, part in enumerate(("q", "k", "v"))}
    )


def from_hf(config: Fields) -> ModelSpec:
    sizes = hf_sizes(config, eps=1e-5, max_position=4096)
    attention = sizes.attention(sizes.hf_rope(config, partial=1.0), window=window(config))
    return sizes.model("phi3", LayerSpec(attention, FfnSpec(sizes.intermediate, activation(config))))


def from_gguf(fields: Fields, file: GGUFFile) -> ModelSpec:
    sizes = gguf_sizes(fields, file)
    size = window(fields, "attention.sliding_window")
    attention = sizes.attention(_gguf_longrope(fields, file, sizes.head_dim), window=size)
    return sizes.model("phi3", LayerSpec(attention, FfnSpec(sizes.intermediate)))


_LISTS = ("rope_factors_short.weight", "rope_factors_long.weight")


def _gguf_longrope(fields: Fields, file: GGUFFile, head_dim: int) -> RopeSpec:
    """The two lists of factors are tensors; a file without them has the plain rotation."""
    plain = gguf_rope(fields, file, head_dim, longrope=True)
    lists = []
    if fields.get("rope.scaling.type") != "longrope" and _LISTS[0] not in file.tensors:
        return plain
    for name in _LISTS:
        if name not in file.tensors:
            raise ModelError(f"{file.path}: tensor {name!r} is missing, which longrope needs.")
        values = np.asarray(file.read(name), np.float64)
        if values.shape != (plain.rotary_dim // 2,) or not np.all(values > 0):
            raise ModelError(
                f"{file.path}: tensor {name!r} does not hold {plain.rotary_dim // 2} numbers above 0."
            )
        lists.append(tuple(values.tolist()))
    longest = fields.integer("context_length")
    return replace(
        plain,
        kind="longrope",
        original_max_position=fields.integer("rope.scaling.original_context_length", longest),
        attention_factor=fields.number("rope.scaling.attn_factor", 1.0),
        short_factors=lists[0],
        long_factors=lists[1],
        length=longest,
    )


FAMILY = Family(
    name="phi3",
    models="Phi-3, Phi-3.5, Phi-4-mini",
    hf_architectures=("Phi3ForCausalLM",),
    from_hf=from_hf,
    hf_names={**HF_NAMES, **HF_FUSED_GATE_UP, **_fused(HF_LAYER, "self_attn.qkv_proj")},
    gguf_architectures=("phi3",),
    from_gguf=from_gguf,
    gguf_names={**GGUF_NAMES, **GGUF_FUSED_GATE_UP, **_fused(GGUF_LAYER, "attn_qkv")},
)
