"""Gemma 2: Gemma with norms before and after each block, capped scores and logits, windows in turn."""

from __future__ import annotations

from lmdeploy.models.checkpoint import NameTable
from lmdeploy.models.families.base import (
    Family,
    activation,
    gguf_rope,
    gguf_sizes,
    gguf_sliding_layers,
    hf_sizes,
    positive,
    sliding_layers,
    window,
)
from lmdeploy.models.families.names import GGUF_NAMES, HF_LAYER, HF_NAMES, layer_names
from lmdeploy.models.fields import Fields
from lmdeploy.models.gguf import GGUFFile
from lmdeploy.models.spec import FfnSpec, LayerSpec, ModelSpec

LAYERS_27B = 46  # GGUF does not say the scale of scores; only the 27B model has another than the rest

HF_FOUR_NORMS: NameTable = {
    **HF_NAMES,
    **layer_names(
        HF_LAYER,
        {
            "attn_post_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "ffn_post_norm": "post_feedforward_layernorm",
        },
    ),
}


def from_hf(config: Fields) -> ModelSpec:
    sizes = hf_sizes(config, tied=True, max_position=8192, kv_heads=4, head_dim=256)
    bias = config.flag("attention_bias")
    size, rope = window(config, absent=4096), sizes.hf_rope(config)
    scale = config.number("query_pre_attn_scalar", 256) ** -0.5
    cap = positive(config, "attn_logit_softcapping", 50.0)
    ffn = FfnSpec(sizes.intermediate, activation(config, "hidden_activation", "gelu_pytorch_tanh"))
    layers = []
    for slides in sliding_layers(config, sizes.layers, [i % 2 == 0 for i in range(sizes.layers)]):
        attention = sizes.attention(
            rope, scale, qkv_bias=bias, out_bias=bias, window=size if slides else None, softcap=cap
        )
        layers.append(LayerSpec(attention, ffn, post_norm=True))
    return sizes.model(
        "gemma2",
        layers,
        norm_offset=1.0,
        embedding_scale=sizes.hidden**0.5,
        logit_softcap=positive(config, "final_logit_softcapping", 30.0),
    )


def from_gguf(fields: Fields, file: GGUFFile) -> ModelSpec:
    sizes = gguf_sizes(fields, file)
    rope = gguf_rope(fields, file, sizes.head_dim)
    size = fields.integer("attention.sliding_window", 4096)
    divisor = sizes.hidden // sizes.heads if sizes.layers == LAYERS_27B else sizes.head_dim
    cap = positive(fields, "attn_logit_softcapping", 50.0)
    ffn = FfnSpec(sizes.intermediate, "gelu_tanh")
    layers = []
    for slides in gguf_sliding_layers(fields, sizes.layers, 2):
        attention = sizes.attention(rope, divisor**-0.5, window=size if slides else None, softcap=cap)
        layers.append(LayerSpec(attention, ffn, post_norm=True))
    cap = positive(fields, "final_logit_softcapping", 30.0)
    return sizes.model("gemma2", layers, embedding_scale=sizes.hidden**0.5, logit_softcap=cap)


FAMILY = Family(
    name="gemma2",
    models="Gemma 2",
    hf_architectures=("Gemma2ForCausalLM",),
    from_hf=from_hf,
    hf_names=HF_FOUR_NORMS,
    gguf_architectures=("gemma2",),
    from_gguf=from_gguf,
    gguf_names=GGUF_NAMES,
)
