"""GLM-4-0414: GLM with norms after each block too."""

from __future__ import annotations

from lmdeploy.models.checkpoint import NameTable
from lmdeploy.models.families.base import Family, gguf_rope, gguf_sizes
from lmdeploy.models.families.glm import HF_GLM, parts_from_hf
from lmdeploy.models.families.names import (
    GGUF_FUSED_GATE_UP,
    GGUF_NAMES,
    GGUF_PAIRS_APART,
    HF_LAYER,
    layer_names,
)
from lmdeploy.models.fields import Fields
from lmdeploy.models.gguf import GGUFFile
from lmdeploy.models.spec import FfnSpec, LayerSpec, ModelSpec

HF: NameTable = {
    **HF_GLM,
    **layer_names(
        HF_LAYER, {"attn_post_norm": "post_self_attn_layernorm", "ffn_post_norm": "post_mlp_layernorm"}
    ),
}


def from_hf(config: Fields) -> ModelSpec:
    sizes, attention, ffn = parts_from_hf(config)
    return sizes.model("glm4", LayerSpec(attention, ffn, post_norm=True))


def from_gguf(fields: Fields, file: GGUFFile) -> ModelSpec:
    sizes = gguf_sizes(fields, file)
    bias = "blk.0.attn_q.bias" in file.tensors
    attention = sizes.attention(gguf_rope(fields, file, sizes.head_dim), qkv_bias=bias)
    return sizes.model("glm4", LayerSpec(attention, FfnSpec(sizes.intermediate), post_norm=True))


FAMILY = Family(
    name="glm4",
    models="GLM-4-0414, GLM-Z1",
    hf_architectures=("Glm4ForCausalLM",),
    from_hf=from_hf,
    hf_names=HF,
    gguf_architectures=("glm4",),
    from_gguf=from_gguf,
    gguf_names={**GGUF_NAMES, **GGUF_FUSED_GATE_UP, **GGUF_PAIRS_APART},
)
