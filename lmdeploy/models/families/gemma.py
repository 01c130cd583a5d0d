"""Gemma: scaled embeddings, norms of weight + 1, GELU. llama.cpp files hold the norms with 1 added."""

from __future__ import annotations

from lmdeploy.models.families.base import Family, activation, gguf_rope, gguf_sizes, hf_sizes
from lmdeploy.models.families.names import GGUF_NAMES, HF_NAMES
from lmdeploy.models.fields import Fields
from lmdeploy.models.gguf import GGUFFile
from lmdeploy.models.spec import Activation, FfnSpec, LayerSpec, ModelSpec


def _activation(config: Fields) -> Activation:
    """Early files say "gelu" in `hidden_act` and mean the tanh form."""
    if config.get("hidden_activation") is not None:
        config.get("hidden_act")
        return activation(config, "hidden_activation")
    name = activation(config, default="gelu_pytorch_tanh")
    return "gelu_tanh" if name == "gelu" else name


def from_hf(config: Fields) -> ModelSpec:
    sizes = hf_sizes(config, tied=True, max_position=8192, kv_heads=16, head_dim=256)
    bias = config.flag("attention_bias")
    rope = sizes.hf_rope(config)
    attention = sizes.attention(rope, qkv_bias=bias, out_bias=bias)
    layer = LayerSpec(attention, FfnSpec(sizes.intermediate, _activation(config)))
    return sizes.model("gemma", layer, norm_offset=1.0, embedding_scale=sizes.hidden**0.5)


def from_gguf(fields: Fields, file: GGUFFile) -> ModelSpec:
    sizes = gguf_sizes(fields, file)
    attention = sizes.attention(gguf_rope(fields, file, sizes.head_dim))
    layer = LayerSpec(attention, FfnSpec(sizes.intermediate, "gelu_tanh"))
    return sizes.model("gemma", layer, embedding_scale=sizes.hidden**0.5)


FAMILY = Family(
    name="gemma",
    models="Gemma 1",
    hf_architectures=("GemmaForCausalLM",),
    from_hf=from_hf,
    hf_names=HF_NAMES,
    gguf_architectures=("gemma",),
    from_gguf=from_gguf,
    gguf_names=GGUF_NAMES,
)
