"""Mistral, Mistral NeMo and Ministral: Llama with a sliding window in all layers or in those listed.

llama.cpp files of them are of architecture `llama`, or `mistral3` since it has that.
"""

from __future__ import annotations

from dataclasses import replace

from lmdeploy.models.families import llama
from lmdeploy.models.families.base import Family, activation, hf_sizes, sliding_layers, window
from lmdeploy.models.families.names import HF_NAMES
from lmdeploy.models.fields import Fields
from lmdeploy.models.gguf import GGUFFile
from lmdeploy.models.spec import FfnSpec, LayerSpec, ModelSpec


def from_hf(config: Fields) -> ModelSpec:
    sizes, size = hf_sizes(config, max_position=131072, kv_heads=8), window(config, absent=4096)
    rope, ffn = sizes.hf_rope(config), FfnSpec(sizes.intermediate, activation(config))
    layers = [
        LayerSpec(sizes.attention(rope, window=size if slides else None), ffn)
        for slides in sliding_layers(config, sizes.layers, [True] * sizes.layers)
    ]
    return sizes.model("mistral", layers)


def from_gguf(fields: Fields, file: GGUFFile) -> ModelSpec:
    return replace(llama.from_gguf(fields, file), family="mistral")


FAMILY = Family(
    name="mistral",
    models="Mistral 7B, Mistral NeMo, Mistral Small 3, Ministral 8B",
    hf_architectures=("MistralForCausalLM", "MinistralForCausalLM"),
    from_hf=from_hf,
    hf_names=HF_NAMES,
    gguf_architectures=("mistral3",),
    from_gguf=from_gguf,
    gguf_names=llama.PAIRED_GGUF_NAMES,
    hf_text_parts={"Mistral3ForConditionalGeneration": "mistral"},
)
