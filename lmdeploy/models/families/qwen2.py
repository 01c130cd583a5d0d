"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and optional windows in later layers."""

from __future__ import annotations

from lmdeploy.models.families.base import (
    Family,
    activation,
    gguf_rope,
    gguf_sizes,
    hf_sizes,
    sliding_layers,
    window,
)
from lmdeploy.models.families.names import GGUF_NAMES, HF_NAMES
from lmdeploy.models.fields import Fields
from lmdeploy.models.gguf import GGUFFile
from lmdeploy.models.spec import FfnSpec, LayerSpec, ModelSpec


def windows(config: Fields, layers: int) -> list[int | None]:
    """Window of each layer. `use_sliding_window` is the switch; `max_window_layers` is the first with one."""
    size, first = window(config, absent=4096), config.get("max_window_layers")
    on = config.flag("use_sliding_window") and size is not None
    first = config.integer("max_window_layers", 28) if on and first != 0 else 0
    sliding = sliding_layers(config, layers, [i >= first for i in range(layers)])
    return [size if on and slides else None for slides in sliding]


def from_hf(config: Fields) -> ModelSpec:
    sizes = hf_sizes(config, max_position=32768, kv_heads=32)
    rope, ffn = sizes.hf_rope(config), FfnSpec(sizes.intermediate, activation(config))
    layers = [
        LayerSpec(sizes.attention(rope, qkv_bias=True, window=size), ffn)
        for size in windows(config, sizes.layers)
    ]
    return sizes.model("qwen2", layers)


def from_gguf(fields: Fields, file: GGUFFile) -> ModelSpec:
    sizes = gguf_sizes(fields, file)
    attention = sizes.attention(gguf_rope(fields, file, sizes.head_dim), qkv_bias=True)
    return sizes.model("qwen2", LayerSpec(attention, FfnSpec(sizes.intermediate)))


FAMILY = Family(
    name="qwen2",
    models="Qwen2, Qwen2.5",
    hf_architectures=("Qwen2ForCausalLM",),
    from_hf=from_hf,
    hf_names=HF_NAMES,
    gguf_architectures=("qwen2",),
    from_gguf=from_gguf,
    gguf_names=GGUF_NAMES,
)
