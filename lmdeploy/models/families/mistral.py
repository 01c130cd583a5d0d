"""Mistral, Mistral NeMo and Ministral: Llama with a sliding window in all layers or in those listed.

llama.cpp files of them are of architecture `llama`.
"""

from __future__ import annotations

from lmdeploy.models.families.base import Family, activation, hf_sizes, sliding_layers, window
from lmdeploy.models.families.names import HF_NAMES
from lmdeploy.models.fields import Fields
from lmdeploy.models.spec import FfnSpec, LayerSpec, ModelSpec


def from_hf(config: Fields) -> ModelSpec:
    sizes, size = hf_sizes(config, max_position=131072, kv_heads=8), window(config, absent=4096)
    rope, ffn = sizes.hf_rope(config), FfnSpec(sizes.intermediate, activation(config))
    layers = [
        LayerSpec(sizes.attention(rope, window=size if slides else None), ffn)
        for slides in sliding_layers(config, sizes.layers, [True] * sizes.layers)
    ]
    return sizes.model("mistral", layers)


FAMILY = Family(
    name="mistral",
    models="Mistral 7B, Mistral NeMo, Ministral 8B",
    hf_architectures=("MistralForCausalLM", "MinistralForCausalLM"),
    from_hf=from_hf,
    hf_names=HF_NAMES,
)
