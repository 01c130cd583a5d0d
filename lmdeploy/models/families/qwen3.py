"""Qwen3: norms on query and key heads, a head dimension of its own, no biases by default."""

from __future__ import annotations

from lmdeploy.models.families.base import Family, activation, gguf_rope, gguf_sizes, hf_sizes
from lmdeploy.models.families.names import GGUF_NAMES, HF_NAMES
from lmdeploy.models.families.qwen2 import windows
from lmdeploy.models.fields import Fields
from lmdeploy.models.gguf import GGUFFile
from lmdeploy.models.spec import FfnSpec, LayerSpec, ModelSpec


def from_hf(config: Fields) -> ModelSpec:
    sizes = hf_sizes(config, max_position=32768, kv_heads=32, head_dim=128)
    bias = config.flag("attention_bias")
    rope, ffn = sizes.hf_rope(config), FfnSpec(sizes.intermediate, activation(config))
    layers = [
        LayerSpec(sizes.attention(rope, qkv_bias=bias, out_bias=bias, qk_norm=True, window=size), ffn)
        for size in windows(config, sizes.layers)
    ]
    return sizes.model("qwen3", layers)


def from_gguf(fields: Fields, file: GGUFFile) -> ModelSpec:
    sizes = gguf_sizes(fields, file)
    attention = sizes.attention(gguf_rope(fields, file, sizes.head_dim), qk_norm=True)
    return sizes.model("qwen3", LayerSpec(attention, FfnSpec(sizes.intermediate)))


FAMILY = Family(
    name="qwen3",
    models="Qwen3",
    hf_architectures=("Qwen3ForCausalLM",),
    from_hf=from_hf,
    hf_names=HF_NAMES,
    gguf_architectures=("qwen3",),
    from_gguf=from_gguf,
    gguf_names=GGUF_NAMES,
)
