"""OLMo 2: norms after each block only, and norms of queries and keys across all heads."""

from __future__ import annotations

from lmdeploy.models.checkpoint import NameTable
from lmdeploy.models.families.base import Family, Sizes, activation, gguf_rope, gguf_sizes, hf_sizes
from lmdeploy.models.families.names import GGUF_NAMES, HF_LAYER, HF_NAMES, layer_names
from lmdeploy.models.fields import Fields
from lmdeploy.models.gguf import GGUFFile
from lmdeploy.models.spec import FfnSpec, LayerSpec, ModelSpec, RopeSpec

HF: NameTable = {
    **HF_NAMES,
    **layer_names(
        HF_LAYER,
        {"attn_post_norm": "post_attention_layernorm", "ffn_post_norm": "post_feedforward_layernorm"},
    ),
}


def _model(sizes: Sizes, rope: RopeSpec, ffn: FfnSpec, bias: bool) -> ModelSpec:
    attention = sizes.attention(rope, qkv_bias=bias, out_bias=bias, qk_norm=True, qk_norm_across_heads=True)
    return sizes.model("olmo2", LayerSpec(attention, ffn, pre_norm=False, post_norm=True))


def from_hf(config: Fields) -> ModelSpec:
    sizes = hf_sizes(config, eps=1e-5)
    ffn = FfnSpec(sizes.intermediate, activation(config))
    return _model(sizes, sizes.hf_rope(config), ffn, config.flag("attention_bias"))


def from_gguf(fields: Fields, file: GGUFFile) -> ModelSpec:
    sizes = gguf_sizes(fields, file)
    return _model(sizes, gguf_rope(fields, file, sizes.head_dim), FfnSpec(sizes.intermediate), False)


FAMILY = Family(
    name="olmo2",
    models="OLMo 2",
    hf_architectures=("Olmo2ForCausalLM",),
    from_hf=from_hf,
    hf_names=HF,
    gguf_architectures=("olmo2",),
    from_gguf=from_gguf,
    gguf_names=GGUF_NAMES,
)
