"""Seed-OSS: Llama with a bias switch of its own for the output projection.

llama.cpp files name the norm before the feed-forward block as other families' files name one after attention.
"""

from __future__ import annotations

from lmdeploy.models.checkpoint import NameTable
from lmdeploy.models.families.base import Family, activation, gguf_rope, gguf_sizes, hf_sizes
from lmdeploy.models.families.names import GGUF_LAYER, GGUF_NAMES, HF_NAMES, layer_names
from lmdeploy.models.fields import Fields
from lmdeploy.models.gguf import GGUFFile
from lmdeploy.models.spec import FfnSpec, LayerSpec, ModelSpec

GGUF: NameTable = {**GGUF_NAMES, **layer_names(GGUF_LAYER, {"ffn_norm": "post_attention_norm"})}


def from_hf(config: Fields) -> ModelSpec:
    sizes = hf_sizes(config, max_position=524288, kv_heads=8, head_dim=128)
    attention = sizes.attention(
        sizes.hf_rope(config),
        qkv_bias=config.flag("attention_bias", True),
        out_bias=config.flag("attention_out_bias"),
    )
    ffn = FfnSpec(sizes.intermediate, activation(config), config.flag("mlp_bias"))
    return sizes.model("seed_oss", LayerSpec(attention, ffn))


def from_gguf(fields: Fields, file: GGUFFile) -> ModelSpec:
    sizes, bias = gguf_sizes(fields, file), "blk.0.attn_q.bias" in file.tensors
    attention = sizes.attention(gguf_rope(fields, file, sizes.head_dim), qkv_bias=bias)
    return sizes.model("seed_oss", LayerSpec(attention, FfnSpec(sizes.intermediate)))


FAMILY = Family(
    name="seed_oss",
    models="Seed-OSS",
    hf_architectures=("SeedOssForCausalLM",),
    from_hf=from_hf,
    hf_names=HF_NAMES,
    gguf_architectures=("seed_oss",),
    from_gguf=from_gguf,
    gguf_names=GGUF,
)
