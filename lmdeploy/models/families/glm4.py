"""GLM-4-0414: GLM with norms after each block too."""

from __future__ import annotations

from lmdeploy.models.checkpoint import NameTable
from lmdeploy.models.families.base import Family
from lmdeploy.models.families.glm import GGUF_GLM, HF_GLM, parts_from_gguf, parts_from_hf
from lmdeploy.models.families.names import HF_LAYER, layer_names
from lmdeploy.models.fields import Fields
from lmdeploy.models.gguf import GGUFFile
from lmdeploy.models.spec import LayerSpec, ModelSpec

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
    sizes, attention, ffn = parts_from_gguf(fields, file)
    return sizes.model("glm4", LayerSpec(attention, ffn, post_norm=True))


FAMILY = Family(
    name="glm4",
    models="GLM-4-0414, GLM-Z1",
    hf_architectures=("Glm4ForCausalLM",),
    from_hf=from_hf,
    hf_names=HF,
    gguf_architectures=("glm4",),
    from_gguf=from_gguf,
    gguf_names=GGUF_GLM,
)
