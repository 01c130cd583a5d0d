"""Llama 1 to 3.2 and the models that share its architecture, SmolLM2 among them.

From a config.json of LlamaForCausalLM, or from GGUF metadata of architecture `llama`.
"""

from __future__ import annotations

from lmdeploy.models.checkpoint import NameTable
from lmdeploy.models.families.base import Family, activation, gguf_rope, gguf_sizes, hf_sizes
from lmdeploy.models.families.names import GGUF_NAMES, GGUF_PAIRS_APART, HF_NAMES
from lmdeploy.models.fields import Fields
from lmdeploy.models.gguf import GGUFFile
from lmdeploy.models.spec import FfnSpec, LayerSpec, ModelSpec

PAIRED_GGUF_NAMES: NameTable = {**GGUF_NAMES, **GGUF_PAIRS_APART}


def from_hf(config: Fields) -> ModelSpec:
    sizes, bias = hf_sizes(config), config.flag("attention_bias")
    rope = sizes.hf_rope(config)
    ffn = FfnSpec(sizes.intermediate, activation(config), config.flag("mlp_bias"))
    return sizes.model("llama", LayerSpec(sizes.attention(rope, qkv_bias=bias, out_bias=bias), ffn))


def from_gguf(fields: Fields, file: GGUFFile) -> ModelSpec:
    sizes = gguf_sizes(fields, file)
    attention = sizes.attention(
        gguf_rope(fields, file, sizes.head_dim),
        fields.number("attention.scale", sizes.head_dim**-0.5),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        out_bias="blk.0.attn_output.bias" in file.tensors,
    )
    ffn = FfnSpec(sizes.intermediate, bias="blk.0.ffn_down.bias" in file.tensors)
    return sizes.model("llama", LayerSpec(attention, ffn))


FAMILY = Family(
    name="llama",
    models="Llama 1 to 3.2, SmolLM2",
    hf_architectures=("LlamaForCausalLM",),
    from_hf=from_hf,
    hf_names=HF_NAMES,
    gguf_architectures=("llama",),
    from_gguf=from_gguf,
    gguf_names=PAIRED_GGUF_NAMES,
)
