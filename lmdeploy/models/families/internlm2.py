"""InternLM2 and InternLM2.5: Llama with queries, keys and values in one matrix, grouped by key head."""

from __future__ import annotations

from lmdeploy.models.checkpoint import NameTable, Source
from lmdeploy.models.families.base import Family, activation, gguf_rope, gguf_sizes, hf_sizes
from lmdeploy.models.families.llama import PAIRED_GGUF_NAMES
from lmdeploy.models.families.names import HF_LAYER, grouped_qkv, layer_names
from lmdeploy.models.fields import Fields
from lmdeploy.models.gguf import GGUFFile
from lmdeploy.models.spec import FfnSpec, LayerSpec, ModelSpec

HF: NameTable = {
    "embed.weight": Source("model.tok_embeddings.weight"),
    "norm.weight": Source("model.norm.weight"),
    "lm_head.weight": Source("output.weight"),
    **layer_names(
        HF_LAYER,
        {
            "attn_norm": "attention_norm",
            "ffn_norm": "ffn_norm",
            "attn.q_proj": ("attention.wqkv", grouped_qkv(0)),
            "attn.k_proj": ("attention.wqkv", grouped_qkv(1)),
            "attn.v_proj": ("attention.wqkv", grouped_qkv(2)),
            "attn.o_proj": "attention.wo",
            "ffn.gate_proj": "feed_forward.w1",
            "ffn.up_proj": "feed_forward.w3",
            "ffn.down_proj": "feed_forward.w2",
        },
    ),
}


def from_hf(config: Fields) -> ModelSpec:
    sizes, bias = hf_sizes(config), config.flag("bias", True)
    attention = sizes.attention(sizes.hf_rope(config), qkv_bias=bias, out_bias=bias)
    return sizes.model("internlm2", LayerSpec(attention, FfnSpec(sizes.intermediate, activation(config))))


def from_gguf(fields: Fields, file: GGUFFile) -> ModelSpec:
    sizes = gguf_sizes(fields, file)
    attention = sizes.attention(gguf_rope(fields, file, sizes.head_dim))
    return sizes.model("internlm2", LayerSpec(attention, FfnSpec(sizes.intermediate)))


FAMILY = Family(
    name="internlm2",
    models="InternLM2, InternLM2.5",
    hf_architectures=("InternLM2ForCausalLM",),
    from_hf=from_hf,
    hf_names=HF,
    gguf_architectures=("internlm2",),
    from_gguf=from_gguf,
    gguf_names=PAIRED_GGUF_NAMES,
)
