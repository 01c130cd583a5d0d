"""The rows of the family tests: one for each family or feature, as a tiny model of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Tensors = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A transformers model; `rename` and `describe` make of it files of a family that transformers lacks."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    gguf: str | None = None  # architecture in llama.cpp, where it has this one
    rename: Callable[[Tensors, Any], Tensors] | None = None
    describe: dict[str, Any] = field(default_factory=dict)


def fused_wqkv(tensors: Tensors, config: Any) -> Tensors:
    """Names and the one matrix of InternLM2, from its public description: rows are, for each key head, the
    query heads that use it, the key head and the value head."""
    names = {
        "embed_tokens": "tok_embeddings", "lm_head": "output", "self_attn": "attention", "o_proj": "wo",
        "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "mlp": "feed_forward",
        "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3",
    }  # fmt: skip
    result: Tensors = {}
    for name, values in tensors.items():
        if not any(part in name for part in ("q_proj", "k_proj", "v_proj")):
            result[".".join(names.get(part, part) for part in name.split("."))] = values
    dim, groups = config.head_dim, config.num_key_value_heads
    per_group = config.num_attention_heads // groups
    for i in range(config.num_hidden_layers):
        q, k, v = (tensors[f"model.layers.{i}.self_attn.{x}_proj.weight"] for x in "qkv")
        rows = []
        for g in range(groups):
            rows += [q[dim * (g * per_group + h) : dim * (g * per_group + h + 1)] for h in range(per_group)]
            rows += [k[dim * g : dim * (g + 1)], v[dim * g : dim * (g + 1)]]
        result[f"model.layers.{i}.attention.wqkv.weight"] = np.concatenate(rows)
    return result


def same_names(tensors: Tensors, config: Any) -> Tensors:
    return tensors


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5],
    "long_factor": [1.5, 2.0, 3.0, 4.5, 6.0, 9.0, 13.0, 20.0],
    "original_max_position_embeddings": 48,
}
LONG_PHI = {
    "head_dim": 16, "hidden_size": 96, "original_max_position_embeddings": 48,
    "max_position_embeddings": 192, "rope_parameters": LONGROPE,
}  # fmt: skip
PHI_4 = {**LONGROPE, "partial_rotary_factor": 0.75, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
GEMMA = {"query_pre_attn_scalar": 40, "sliding_window": 24}
GEMMA_3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.5,
}
INTERNLM2 = {
    "rename": fused_wqkv,
    "describe": {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": False},
}
INTERNLM3 = {"architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3"}


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **ROPES[kind], "rope_type": kind, **more}}


ROWS: dict[str, Row] = {
    "llama": Row("Llama", gguf="llama"),
    "llama, all heads with keys": Row("Llama", {"num_key_value_heads": 6}),
    "llama, biases, tied": Row(
        "Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    ),
    "llama, linear": Row("Llama", rope("linear"), gguf="llama"),
    "llama, dynamic": Row("Llama", {**rope("dynamic"), "max_position_embeddings": 40}),
    "llama, yarn": Row("Llama", rope("yarn"), gguf="llama"),
    "llama, yarn with its options": Row(
        "Llama",
        rope(
            "yarn",
            beta_fast=20.0,
            beta_slow=2.0,
            mscale=0.7,
            mscale_all_dim=1.3,
            truncate=False,
            rope_theta=100.0,
        ),
    ),
    "llama, yarn with its factor": Row("Llama", rope("yarn", attention_factor=1.2)),
    "llama, llama3": Row("Llama", rope("llama3")),
    "qwen2": Row("Qwen2", {"hidden_size": 96}, gguf="qwen2"),
    "qwen2, windows in later layers": Row(
        "Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2, "hidden_size": 96}
    ),
    "qwen3": Row("Qwen3", {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}, gguf="qwen3"),
    "qwen3, biases, yarn": Row("Qwen3", {"attention_bias": True, **rope("yarn")}),
    "internlm2": Row("Llama", gguf="internlm2", **INTERNLM2),  # type: ignore[arg-type]
    "internlm2, dynamic": Row(
        "Llama",
        {**rope("dynamic"), "max_position_embeddings": 40},
        **INTERNLM2,  # type: ignore[arg-type]
    ),
    "internlm3": Row("Llama", rename=same_names, describe={**INTERNLM3, "bias": False, "qkv_bias": False}),
    "internlm3, biases": Row(
        "Llama",
        {"attention_bias": True, "mlp_bias": True},
        rename=same_names,
        describe={**INTERNLM3, "bias": True, "qkv_bias": True},
    ),
    "mistral": Row("Mistral", {"sliding_window": None}, gguf="mistral3"),
    "mistral, window": Row("Mistral", {"sliding_window": 20}),
    "ministral": Row(
        "Ministral", {"sliding_window": 20, "layer_types": ["full_attention", "sliding_attention"] * 2}
    ),
    "gemma": Row("Gemma", gguf="gemma"),
    "gemma2": Row("Gemma2", {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}),
    "gemma2, usual scale": Row("Gemma2", {**GEMMA, "query_pre_attn_scalar": 16}, gguf="gemma2"),
    "gemma3": Row("Gemma3", {**GEMMA, "num_hidden_layers": 7, "rope_parameters": GEMMA_3_ROPE}),
    "gemma3, usual scale": Row(
        "Gemma3", {**GEMMA, "query_pre_attn_scalar": 16, "num_hidden_layers": 7}, gguf="gemma3"
    ),
    "phi3": Row("Phi3", {"hidden_size": 96, "sliding_window": 20}, gguf="phi3"),
    "phi3, longrope": Row("Phi3", LONG_PHI, gguf="phi3"),
    "phi3, longrope, part of a head": Row("Phi3", {**LONG_PHI, "rope_parameters": PHI_4}, gguf="phi3"),
    "glm": Row("Glm", gguf="chatglm"),
    "glm4": Row("Glm4", gguf="glm4"),
    "granite": Row("Granite", {"hidden_size": 96, **MULTIPLIERS}, gguf="granite"),
    "granite, biases, tied": Row(
        "Granite",
        {**MULTIPLIERS, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "olmo2": Row("Olmo2", {"hidden_size": 96}, gguf="olmo2"),
    "olmo2, all heads with keys": Row("Olmo2", {"hidden_size": 96, "num_key_value_heads": 6}),
    "seed_oss": Row("SeedOss", gguf="seed_oss"),
    "seed_oss, no biases, tied": Row(
        "SeedOss", {"attention_bias": False, "tie_word_embeddings": True}, gguf="seed_oss"
    ),
    "seed_oss, every bias": Row("SeedOss", {"attention_out_bias": True, "mlp_bias": True}),
    "smollm3": Row("SmolLM3", {"hidden_size": 96}, gguf="smollm3"),
    "smollm3, windows": Row(
        "SmolLM3",
        {"hidden_size": 96, "use_sliding_window": True, "sliding_window": 20, "no_rope_layers": [1, 0, 0, 1]},
    ),
}
