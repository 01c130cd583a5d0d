"""GLM-4-9B as transformers and llama.cpp write it: half of each head turns, in neighbouring pairs."""

from __future__ import annotations

from lmdeploy.models.checkpoint import NameTable
from lmdeploy.models.families.base import Family, Sizes, activation, gguf_rope, gguf_sizes, hf_sizes
from lmdeploy.models.families.names import (
    GGUF_FUSED_GATE_UP,
    GGUF_NAMES,
    GGUF_QKV_OR_PAIRS_APART,
    HF_FUSED_GATE_UP,
    HF_LAYER,
    HF_NAMES,
    K_PAIRS_APART,
    Q_PAIRS_APART,
    layer_names,
)
from lmdeploy.models.fields import Fields
from lmdeploy.models.gguf import GGUFFile
from lmdeploy.models.spec import AttentionSpec, FfnSpec, LayerSpec, ModelSpec

HF_GLM: NameTable = {
    **HF_NAMES,
    **HF_FUSED_GATE_UP,
    **layer_names(
        HF_LAYER,
        {
            "attn.q_proj": ("self_attn.q_proj", Q_PAIRS_APART),
            "attn.k_proj": ("self_attn.k_proj", K_PAIRS_APART),
        },
    ),
}


GGUF_GLM: NameTable = {**GGUF_NAMES, **GGUF_FUSED_GATE_UP, **GGUF_QKV_OR_PAIRS_APART}


def parts_from_hf(config: Fields) -> tuple[Sizes, AttentionSpec, FfnSpec]:
    """What all GLM models have in common."""
    sizes = hf_sizes(config, eps=1.5625e-07, max_position=131072, kv_heads=2, head_dim=128)
    rope = sizes.hf_rope(config, partial=0.5)
    attention = sizes.attention(rope, qkv_bias=config.flag("attention_bias", True))
    return sizes, attention, FfnSpec(sizes.intermediate, activation(config))


def from_hf(config: Fields) -> ModelSpec:
    sizes, attention, ffn = parts_from_hf(config)
    return sizes.model("glm", LayerSpec(attention, ffn))


def parts_from_gguf(fields: Fields, file: GGUFFile) -> tuple[Sizes, AttentionSpec, FfnSpec]:
    """What all GLM models have in common."""
    sizes = gguf_sizes(fields, file)
    bias = not file.tensors.keys().isdisjoint(("blk.0.attn_q.bias", "blk.0.attn_qkv.bias"))
    attention = sizes.attention(gguf_rope(fields, file, sizes.head_dim), qkv_bias=bias)
    return sizes, attention, FfnSpec(sizes.intermediate)


def from_gguf(fields: Fields, file: GGUFFile) -> ModelSpec:
    sizes, attention, ffn = parts_from_gguf(fields, file)
    return sizes.model("glm", LayerSpec(attention, ffn))


FAMILY = Family(
    name="glm",
    models="GLM-4-9B, ChatGLM3 (GGUF)",
    hf_architectures=("GlmForCausalLM",),
    from_hf=from_hf,
    hf_names=HF_GLM,
    gguf_architectures=("chatglm",),
    from_gguf=from_gguf,
    gguf_names=GGUF_GLM,
)
