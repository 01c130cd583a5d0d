"""Tiny random models of transformers with the same weights as spec and tensors for the native executor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from native_case import bf16, quantize
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lmdeploy.models.spec import AttentionSpec, FfnSpec, LayerSpec, ModelSpec, NormSpec, RopeSpec
from lmdeploy.quant.tensors import GroupedTensor, Tensor

SIZES: dict[str, Any] = {
    "hidden_size": 72,  # no multiple of a tile or a group
    "intermediate_size": 104,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 130,
    "max_position_embeddings": 4096,
}
WHOLE_GROUPS = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32, "num_attention_heads": 4}
Case = tuple[PreTrainedModel, ModelSpec, dict[str, Tensor]]


def llama(rope: RopeSpec | None = None, **options: Any) -> Case:
    config = LlamaConfig(**{**SIZES, **options})
    rope = rope or RopeSpec(10000.0, config.head_dim)
    return _case(LlamaForCausalLM(config), _spec(config, rope, bool(options.get("attention_bias"))))


def qwen3(**options: Any) -> Case:
    """Norms on query and key heads."""
    config = Qwen3Config(**{**SIZES, **options})
    return _case(
        Qwen3ForCausalLM(config), _spec(config, RopeSpec(10000.0, config.head_dim), False, qk_norm=True)
    )


def gemma2(**options: Any) -> Case:
    """Post norms, norm offset, windows on every other layer, soft caps, scaled embeddings, GELU."""
    values = {**SIZES, "sliding_window": 24, "query_pre_attn_scalar": 40, "attn_logit_softcapping": 5.0}
    config = Gemma2Config(
        **{**values, "final_logit_softcapping": 8.0, "attn_implementation": "eager", **options}
    )
    return _case(Gemma2ForCausalLM(config), gemma2_spec(config))


def gemma2_spec(config: Any) -> ModelSpec:
    layers = tuple(
        LayerSpec(
            AttentionSpec(
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                config.query_pre_attn_scalar**-0.5,
                RopeSpec(10000.0, config.head_dim),
                window=config.sliding_window if kind == "sliding_attention" else None,
                softcap=config.attn_logit_softcapping,
            ),
            FfnSpec(config.intermediate_size, "gelu_tanh"),
            post_norm=True,
        )
        for kind in config.layer_types
    )
    return ModelSpec(
        "test",
        config.hidden_size,
        config.vocab_size,
        4096,
        NormSpec(config.rms_norm_eps, 1.0),
        layers,
        tie_embeddings=True,
        embedding_scale=config.hidden_size**0.5,
        logit_softcap=config.final_logit_softcapping,
    )


def _spec(config: Any, rope: RopeSpec, bias: bool, qk_norm: bool = False) -> ModelSpec:
    attention = AttentionSpec(
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.head_dim**-0.5,
        rope,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=qk_norm,
    )
    act = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}[config.hidden_act]
    ffn = FfnSpec(config.intermediate_size, act, bias=bool(getattr(config, "mlp_bias", False)))  # type: ignore[arg-type]
    layers = (LayerSpec(attention, ffn),) * config.num_hidden_layers
    norm = NormSpec(config.rms_norm_eps)
    return ModelSpec(
        "test", config.hidden_size, config.vocab_size, 4096, norm, layers, config.tie_word_embeddings
    )


_NAMES = {
    "self_attn.o_proj": "attn.o_proj",
    "self_attn": "attn",
    "mlp": "ffn",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_POST_NORM_NAMES = {
    **_NAMES,
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "ffn_post_norm",
}


def canonical(name: str, post_norm: bool) -> str:
    """A tensor's name in the spec's terms."""
    parts = name.removeprefix("model.").split(".")
    if parts[0] == "layers":
        names = _POST_NORM_NAMES if post_norm else _NAMES
        return ".".join([*parts[:2], names[parts[2]], *parts[3:]])
    return name.removeprefix("model.").replace("embed_tokens", "embed")


def _case(model: PreTrainedModel, spec: ModelSpec) -> Case:
    """Random weights, larger than usual so that everything shows in the logits, rounded to bfloat16."""
    torch.manual_seed(0)
    post_norm = spec.layers[0].post_norm
    tensors: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, parameter in model.eval().named_parameters():
            size = 1.2 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.2
            values = torch.randn_like(parameter) * size
            if "norm" in name:
                values += 1.0 - spec.norm.offset
            rounded = bf16(values.numpy())
            parameter.copy_(torch.from_numpy(rounded))
            tensors[canonical(name, post_norm)] = rounded
    return model, spec, tensors


def quantized(case: Case, choose: Callable[[str], tuple[str, int] | None]) -> Case:
    """The case with matrices in groups, and the transformers model holding their dequantised values."""
    model, spec, tensors = case
    result: dict[str, Tensor] = {}
    for name, values in tensors.items():
        form = choose(name)
        assert not isinstance(values, GroupedTensor)
        result[name] = values if form is None else quantize(values.astype(np.float32), *form)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = result[canonical(name, spec.layers[0].post_norm)]
            if isinstance(tensor, GroupedTensor):
                parameter.copy_(torch.from_numpy(tensor.dequantize()))
    return model, spec, result


def expected_logits(model: PreTrainedModel, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """float32 logits of every position."""
    with torch.no_grad():
        logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
    return np.asarray(logits.numpy())
