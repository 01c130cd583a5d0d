"""Granite: Llama with multipliers for embeddings, scores, what blocks add, and logits."""

from __future__ import annotations

from lmdeploy.models.families.base import Family, activation, gguf_rope, gguf_sizes, hf_sizes
from lmdeploy.models.families.llama import PAIRED_GGUF_NAMES
from lmdeploy.models.families.names import HF_NAMES
from lmdeploy.models.fields import Fields
from lmdeploy.models.gguf import GGUFFile
from lmdeploy.models.spec import FfnSpec, LayerSpec, ModelSpec


def from_hf(config: Fields) -> ModelSpec:
    sizes, bias = hf_sizes(config), config.flag("attention_bias")
    scale, rope = config.number("attention_multiplier", 1.0), sizes.hf_rope(config)
    attention = sizes.attention(rope, scale, qkv_bias=bias, out_bias=bias)
    ffn = FfnSpec(sizes.intermediate, activation(config), config.flag("mlp_bias"))
    return sizes.model(
        "granite",
        LayerSpec(attention, ffn, residual_scale=config.number("residual_multiplier", 1.0)),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        logit_scale=1 / config.number("logits_scaling", 1.0),
    )


def from_gguf(fields: Fields, file: GGUFFile) -> ModelSpec:
    sizes = gguf_sizes(fields, file)
    scale = fields.number("attention.scale", sizes.head_dim**-0.5)
    attention = sizes.attention(gguf_rope(fields, file, sizes.head_dim), scale)
    ffn, residual = FfnSpec(sizes.intermediate), fields.number("residual_scale", 1.0)
    return sizes.model(
        "granite",
        LayerSpec(attention, ffn, residual_scale=residual),
        embedding_scale=fields.number("embedding_scale", 1.0),
        logit_scale=1 / fields.number("logit_scale", 1.0),
    )


FAMILY = Family(
    name="granite",
    models="Granite 3",
    hf_architectures=("GraniteForCausalLM",),
    from_hf=from_hf,
    hf_names=HF_NAMES,
    gguf_architectures=("granite",),
    from_gguf=from_gguf,
    gguf_names=PAIRED_GGUF_NAMES,
)
