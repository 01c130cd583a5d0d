"""Llama 1 to 3.2 and the models that share its architecture, SmolLM2 among them.

From a config.json of LlamaForCausalLM, or from GGUF metadata of architecture `llama`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from lmdeploy.errors import ModelError
from lmdeploy.models.checkpoint import NameTable, Source
from lmdeploy.models.families.base import Family, activation
from lmdeploy.models.fields import LARGEST_LAYER_COUNT, Fields
from lmdeploy.models.gguf import GGUFFile
from lmdeploy.models.rope import llama3_divisors, rope_from_hf
from lmdeploy.models.spec import AttentionSpec, FfnSpec, LayerSpec, ModelSpec, NormSpec, RopeSpec


def from_hf(config: Fields) -> ModelSpec:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = _head_dim(config, "head_dim", hidden, heads)
    kv_heads = _kv_heads(config, "num_key_value_heads", heads)
    bias = config.flag("attention_bias")
    ffn = FfnSpec(config.integer("intermediate_size"), activation(config), config.flag("mlp_bias"))
    rope = rope_from_hf(config, head_dim)
    attention = AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5, rope, bias, bias)
    return ModelSpec(
        family="llama",
        hidden_size=hidden,
        vocab_size=config.integer("vocab_size"),
        max_position=config.integer("max_position_embeddings", 2048),
        norm=NormSpec(config.number("rms_norm_eps", 1e-6)),
        layers=(LayerSpec(attention, ffn),) * config.integer("num_hidden_layers", most=LARGEST_LAYER_COUNT),
        tie_embeddings=config.flag("tie_word_embeddings"),
    )


def from_gguf(file: GGUFFile) -> ModelSpec:
    fields = Fields(file.metadata, str(file.path), "llama.")
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = _head_dim(fields, "attention.key_length", hidden, heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key, head_dim) != head_dim:
            raise fields.fail(key, f"is {fields.get(key)}; only the head dimension, {head_dim}, is supported")
    if fields.get("expert_count") not in (None, 0):
        raise fields.fail(
            "expert_count", f"is {fields.get('expert_count')}; mixtures of experts are not supported"
        )
    kv_heads = _kv_heads(fields, "attention.head_count_kv", heads)
    attention = AttentionSpec(
        heads,
        kv_heads,
        head_dim,
        fields.number("attention.scale", head_dim**-0.5),
        _gguf_rope(fields, file, head_dim),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        out_bias="blk.0.attn_output.bias" in file.tensors,
    )
    ffn = FfnSpec(fields.integer("feed_forward_length"), bias="blk.0.ffn_down.bias" in file.tensors)
    return ModelSpec(
        family="llama",
        hidden_size=hidden,
        vocab_size=fields.integer("vocab_size", _embedding_rows(file)),
        max_position=fields.integer("context_length"),
        norm=NormSpec(fields.number("attention.layer_norm_rms_epsilon")),
        layers=(LayerSpec(attention, ffn),) * fields.integer("block_count", most=LARGEST_LAYER_COUNT),
        tie_embeddings="output.weight" not in file.tensors,
    )


def _head_dim(fields: Fields, key: str, hidden: int, heads: int) -> int:
    if fields.get(key) is None and hidden % heads:
        raise fields.fail(
            key, f"is missing and the hidden size, {hidden}, is no multiple of the {heads} heads"
        )
    head_dim = fields.integer(key, max(1, hidden // heads))
    if head_dim % 2:
        raise fields.fail(key, f"is {head_dim}; rotary embedding needs an even head dimension")
    return head_dim


def _kv_heads(fields: Fields, key: str, heads: int) -> int:
    kv_heads = fields.integer(key, heads)
    if heads % kv_heads:
        raise fields.fail(key, f"is {kv_heads}, which does not divide the {heads} attention heads")
    return kv_heads


def _embedding_rows(file: GGUFFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path}: tensor 'token_embd.weight' is missing.")
    return file.tensors["token_embd.weight"].shape[0]


def _gguf_rope(fields: Fields, file: GGUFFile, head_dim: int) -> RopeSpec:
    theta = fields.number("rope.freq_base", 10000.0)
    kind = fields.text("rope.scaling.type", "none")
    if kind == "linear":
        return RopeSpec(theta, head_dim, "linear", fields.number("rope.scaling.factor"))
    if kind != "none":
        raise fields.fail(
            "rope.scaling.type", f"is {kind!r}, which is not supported (supported: none, linear)"
        )
    if "rope_freqs.weight" not in file.tensors:
        return RopeSpec(theta, head_dim)
    divisors = np.asarray(file.read("rope_freqs.weight"), np.float64)
    # The file keeps only the divisors of the frequencies; the public models all use 1, 4 and 8192.
    rope = RopeSpec(theta, head_dim, "llama3", float(divisors.max()), 1.0, 4.0, 8192)
    expected = llama3_divisors(rope)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-5):
        raise ModelError(f"{file.path}: rope_freqs.weight holds frequencies other than those of Llama 3.1.")
    return rope


def _half_order(heads_of: Callable[[AttentionSpec], int]) -> Callable[[ModelSpec, int], npt.NDArray[np.intp]]:
    """Rows of GGUF q and k, whose rotary pairs are (2d, 2d + 1), in the order (d, d + head_dim / 2)."""

    def rows(spec: ModelSpec, layer: int) -> npt.NDArray[np.intp]:
        attention = spec.layers[layer].attention
        heads, half = heads_of(attention), attention.head_dim // 2
        stored = np.arange(heads * half * 2, dtype=np.intp).reshape(heads, half, 2)
        return np.ravel(stored.swapaxes(1, 2))

    return rows


_Q_ROWS, _K_ROWS = _half_order(lambda a: a.num_heads), _half_order(lambda a: a.num_kv_heads)

_HF_LAYER = "model.layers.{i}."
_HF_PARTS = {
    "attn.q_proj": "self_attn.q_proj",
    "attn.k_proj": "self_attn.k_proj",
    "attn.v_proj": "self_attn.v_proj",
    "attn.o_proj": "self_attn.o_proj",
    "ffn.gate_proj": "mlp.gate_proj",
    "ffn.up_proj": "mlp.up_proj",
    "ffn.down_proj": "mlp.down_proj",
}
_GGUF_PARTS: dict[str, tuple[str, Any]] = {
    "attn.q_proj": ("attn_q", _Q_ROWS),
    "attn.k_proj": ("attn_k", _K_ROWS),
    "attn.v_proj": ("attn_v", None),
    "attn.o_proj": ("attn_output", None),
    "ffn.gate_proj": ("ffn_gate", None),
    "ffn.up_proj": ("ffn_up", None),
    "ffn.down_proj": ("ffn_down", None),
}

HF_NAMES: NameTable = {
    "embed.weight": Source("model.embed_tokens.weight"),
    "norm.weight": Source("model.norm.weight"),
    "lm_head.weight": Source("lm_head.weight"),
    "layers.{i}.attn_norm.weight": Source(_HF_LAYER + "input_layernorm.weight"),
    "layers.{i}.ffn_norm.weight": Source(_HF_LAYER + "post_attention_layernorm.weight"),
    **{
        f"layers.{{i}}.{part}.{kind}": Source(f"{_HF_LAYER}{name}.{kind}")
        for part, name in _HF_PARTS.items()
        for kind in ("weight", "bias")
    },
}

GGUF_NAMES: NameTable = {
    "embed.weight": Source("token_embd.weight"),
    "norm.weight": Source("output_norm.weight"),
    "lm_head.weight": Source("output.weight"),
    "layers.{i}.attn_norm.weight": Source("blk.{i}.attn_norm.weight"),
    "layers.{i}.ffn_norm.weight": Source("blk.{i}.ffn_norm.weight"),
    **{
        f"layers.{{i}}.{part}.{kind}": Source(f"blk.{{i}}.{name}.{kind}", rows)
        for part, (name, rows) in _GGUF_PARTS.items()
        for kind in ("weight", "bias")
    },
}

FAMILY = Family(
    name="llama",
    hf_architectures=("LlamaForCausalLM",),
    gguf_architectures=("llama",),
    from_hf=from_hf,
    from_gguf=from_gguf,
    hf_names=HF_NAMES,
    gguf_names=GGUF_NAMES,
)
