"""InternLM3: Llama with biases that queries, keys and values have apart from the rest.

llama.cpp files of it are of architecture `llama`.
"""

from __future__ import annotations

from lmdeploy.models.families.base import Family, activation, hf_sizes
from lmdeploy.models.families.names import HF_NAMES
from lmdeploy.models.fields import Fields
from lmdeploy.models.spec import FfnSpec, LayerSpec, ModelSpec


def from_hf(config: Fields) -> ModelSpec:
    sizes, bias = hf_sizes(config, max_position=32768), config.flag("bias")
    rope = sizes.hf_rope(config)
    attention = sizes.attention(rope, qkv_bias=config.flag("qkv_bias"), out_bias=bias)
    ffn = FfnSpec(sizes.intermediate, activation(config), bias)
    return sizes.model("internlm3", LayerSpec(attention, ffn))


FAMILY = Family(
    name="internlm3",
    models="InternLM3",
    hf_architectures=("InternLM3ForCausalLM",),
    from_hf=from_hf,
    hf_names=HF_NAMES,
)
