"""SmolLM3: Llama in which every fourth layer has no rotation."""

from __future__ import annotations

from collections.abc import Sequence

from lmdeploy.models.families.base import (
    Family,
    activation,
    gguf_rope,
    gguf_sizes,
    hf_sizes,
    sliding_layers,
    window,
)
from lmdeploy.models.families.llama import PAIRED_GGUF_NAMES
from lmdeploy.models.families.names import HF_NAMES
from lmdeploy.models.fields import Fields
from lmdeploy.models.gguf import GGUFFile
from lmdeploy.models.spec import FfnSpec, LayerSpec, ModelSpec


def _turned(config: Fields, layers: int) -> Sequence[int]:
    """1 for a layer with rotation, 0 for one without (the field's name says the contrary of its values)."""
    period = config.integer("no_rope_layer_interval", 4)
    return config.choices("no_rope_layers", layers, (0, 1)) or [
        int((i + 1) % period > 0) for i in range(layers)
    ]


def from_hf(config: Fields) -> ModelSpec:
    sizes, bias = hf_sizes(config, tied=True, max_position=32768, kv_heads=4), config.flag("attention_bias")
    rope, turned = sizes.hf_rope(config, theta=2e6), _turned(config, sizes.layers)
    size, on = window(config), config.flag("use_sliding_window")
    ffn = FfnSpec(sizes.intermediate, activation(config), config.flag("mlp_bias"))
    sliding = sliding_layers(config, sizes.layers, [not turns for turns in turned])
    layers = []
    for turns, slides in zip(turned, sliding, strict=True):
        attention = sizes.attention(
            rope if turns else None, qkv_bias=bias, out_bias=bias, window=size if slides and on else None
        )
        layers.append(LayerSpec(attention, ffn))
    return sizes.model("smollm3", layers)


def from_gguf(fields: Fields, file: GGUFFile) -> ModelSpec:
    sizes = gguf_sizes(fields, file)
    rope, ffn = gguf_rope(fields, file, sizes.head_dim), FfnSpec(sizes.intermediate)
    turned = [(i + 1) % 4 > 0 for i in range(sizes.layers)]
    return sizes.model("smollm3", [LayerSpec(sizes.attention(rope if t else None), ffn) for t in turned])


FAMILY = Family(
    name="smollm3",
    models="SmolLM3",
    hf_architectures=("SmolLM3ForCausalLM",),
    from_hf=from_hf,
    hf_names=HF_NAMES,
    gguf_architectures=("smollm3",),
    from_gguf=from_gguf,
    gguf_names=PAIRED_GGUF_NAMES,
)
