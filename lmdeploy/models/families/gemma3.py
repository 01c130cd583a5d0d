"""Gemma 3, text: Gemma 2 without caps, with query and key norms and another rotation where windows are."""

from __future__ import annotations

from lmdeploy.models.families.base import (
    Family,
    Sizes,
    activation,
    gguf_rope,
    gguf_sizes,
    gguf_sliding_layers,
    hf_sizes,
    positive,
    sliding_layers,
    window,
)
from lmdeploy.models.families.gemma2 import HF_FOUR_NORMS
from lmdeploy.models.families.names import GGUF_NAMES
from lmdeploy.models.fields import Fields
from lmdeploy.models.gguf import GGUFFile
from lmdeploy.models.spec import FfnSpec, LayerSpec, ModelSpec, RopeSpec

LAYERS_27B = 62  # GGUF does not say the scale of scores; only the 27B model has another than the rest


def _ropes(config: Fields, sizes: Sizes) -> tuple[RopeSpec, RopeSpec]:
    """Of full and of sliding layers; older files give the latter's theta alone."""
    full = sizes.hf_rope(config, theta=1e6, layer_type="full_attention")
    local = config.number("rope_local_base_freq", 10000.0)
    parameters = config.table("rope_parameters") or {}
    if "sliding_attention" not in parameters:
        return full, RopeSpec(local, sizes.head_dim)
    return full, sizes.hf_rope(config, theta=local, layer_type="sliding_attention")


def from_hf(config: Fields) -> ModelSpec:
    sizes = hf_sizes(config, tied=True, max_position=131072, heads=8, kv_heads=4, head_dim=256, vocab=262208)
    bias = config.flag("attention_bias")
    size, (full, local) = window(config, absent=4096), _ropes(config, sizes)
    scale = config.number("query_pre_attn_scalar", 256) ** -0.5
    cap = positive(config, "attn_logit_softcapping")
    ffn = FfnSpec(sizes.intermediate, activation(config, "hidden_activation", "gelu_pytorch_tanh"))
    period = config.integer("sliding_window_pattern", 6)
    layers = []
    for slides in sliding_layers(config, sizes.layers, [(i + 1) % period > 0 for i in range(sizes.layers)]):
        rope, width = (local, size) if slides else (full, None)
        attention = sizes.attention(
            rope, scale, qkv_bias=bias, out_bias=bias, qk_norm=True, window=width, softcap=cap
        )
        layers.append(LayerSpec(attention, ffn, post_norm=True))
    return sizes.model(
        "gemma3",
        layers,
        norm_offset=1.0,
        embedding_scale=sizes.hidden**0.5,
        logit_softcap=positive(config, "final_logit_softcapping"),
    )


def from_gguf(fields: Fields, file: GGUFFile) -> ModelSpec:
    sizes, size = gguf_sizes(fields, file), window(fields, "attention.sliding_window")
    full = gguf_rope(fields, file, sizes.head_dim)
    local = RopeSpec(fields.number("rope.freq_base_swa", 10000.0), full.rotary_dim)
    divisor = sizes.hidden // sizes.heads if sizes.layers == LAYERS_27B else sizes.head_dim
    ffn = FfnSpec(sizes.intermediate, "gelu_tanh")
    layers = []
    for slides in gguf_sliding_layers(fields, sizes.layers, 6):
        rope, width = (local, size) if slides and size is not None else (full, None)
        attention = sizes.attention(rope, divisor**-0.5, qk_norm=True, window=width)
        layers.append(LayerSpec(attention, ffn, post_norm=True))
    cap = positive(fields, "final_logit_softcapping")
    return sizes.model("gemma3", layers, embedding_scale=sizes.hidden**0.5, logit_softcap=cap)


FAMILY = Family(
    name="gemma3",
    models="Gemma 3, text",
    hf_architectures=("Gemma3ForCausalLM",),
    from_hf=from_hf,
    hf_names=HF_FOUR_NORMS,
    hf_text_parts={"Gemma3ForConditionalGeneration": "gemma3_text"},
    gguf_architectures=("gemma3",),
    from_gguf=from_gguf,
    gguf_names=GGUF_NAMES,
)
