"""Tiny random models of every family, by transformers: as a directory, and as GGUF as llama.cpp writes it.

Names and row orders of GGUF are taken from gguf-py's own table and from what the public converters do, not
from the code under test.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
import transformers
from safetensors.numpy import save_file

SIZES: dict[str, Any] = {
    "hidden_size": 72,
    "intermediate_size": 104,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 130,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
Array = npt.NDArray[Any]


def tiny(name: str, **options: Any) -> Any:
    """A transformers model of `<name>Config` and `<name>ForCausalLM`: weights larger than usual, so that
    every part leaves a trace in the logits, rounded to bfloat16, computed in float32."""
    stem = {"Gemma3": "Gemma3Text"}.get(name, name)
    config = getattr(transformers, f"{stem}Config")(**{**SIZES, **options})
    config._attn_implementation = "eager"  # the only one that caps scores
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(0)
    offset = 0.0 if name.startswith("Gemma") else 1.0
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            size = 1.2 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.2
            if key.startswith("model.embed") and name.startswith("Gemma"):
                size /= config.hidden_size**0.5
            values = torch.randn(parameter.shape, generator=generator) * size
            values += offset if "norm" in key else 0.0
            parameter.copy_(values.bfloat16().float())
    return model


def expected_logits(model: Any, ids: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """float32 [len(ids), vocab], the whole sequence at once."""
    with torch.no_grad():
        logits = model(torch.from_numpy(np.asarray(ids, np.int64))[None]).logits[0]
    return np.asarray(logits.numpy())


def bfloat16(model: Any) -> dict[str, Array]:
    """All parameters, exactly (they were rounded before)."""
    return {k: v.detach().numpy().astype(ml_dtypes.bfloat16) for k, v in model.named_parameters()}


def config_of(model: Any) -> dict[str, Any]:
    """config.json as transformers writes it, with the names of old files for the rotation."""
    config = json.loads(model.config.to_json_string(use_diff=False))
    config["architectures"] = [type(model).__name__]
    return config


def old_spelling(config: Mapping[str, Any], key: str = "rope_type") -> dict[str, Any]:
    """The same with `rope_theta` and `rope_scaling`, as files before transformers 5 have it."""
    old = dict(config)
    parameters = dict(old.pop("rope_parameters"))
    if "full_attention" in parameters:
        old["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        parameters = dict(parameters["full_attention"])
    old["rope_theta"] = parameters.pop("rope_theta")
    if "partial_rotary_factor" in parameters:
        old["partial_rotary_factor"] = parameters.pop("partial_rotary_factor")
    kind = parameters.pop("rope_type")
    old["rope_scaling"] = None if kind == "default" else {**parameters, key: kind}
    return old


def write_hf(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Array]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, str(path / "model.safetensors"))
    return path


def pairs_together(weight: Array, heads: int) -> Array:
    """Rows (d, d + half) of each head to (2d, 2d + 1), as converters do for Llama."""
    shape = weight.shape
    return weight.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


# Architectures whose q and k are reordered.
NEIGHBOURS = ("llama", "internlm2", "smollm3", "granite", "mistral3")
GGUF_KEYS: dict[str, dict[str, str]] = {
    "gemma2": {
        "sliding_window": "attention.sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "gemma3": {"sliding_window": "attention.sliding_window"},
    "phi3": {"sliding_window": "attention.sliding_window"},
    "granite": {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    },
}


def gguf_metadata(model: Any, arch: str) -> dict[str, Any]:
    """What the converter of `arch` writes, without the prefix."""
    c = model.config
    rope = dict(c.rope_parameters.get("full_attention", c.rope_parameters))
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    keys = {
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "block_count": c.num_hidden_layers,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(c.rms_norm_eps),
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
    }
    if rope["rope_type"] in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] in ("yarn", "longrope"):
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        scale = np.log(c.max_position_embeddings / original) / np.log(original)
        keys |= {"rope.scaling.type": "longrope", "rope.scaling.attn_factor": float(np.sqrt(1 + scale))}
    for field, key in GGUF_KEYS.get(arch, {}).items():
        value = getattr(c, field)
        keys[key] = 0 if value is None else value
    return keys


def gguf_tensors(model: Any, arch: str) -> dict[str, Array]:
    """float32 tensors under GGUF names, reordered and shifted as the converter of `arch` does."""
    c = model.config
    kind = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(kind, c.num_hidden_layers)
    tensors: dict[str, Array] = {}
    for key, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if arch in NEIGHBOURS and ".q_proj." in key:
            values = pairs_together(values, c.num_attention_heads)
        if arch in NEIGHBOURS and ".k_proj." in key:
            values = pairs_together(values, c.num_key_value_heads)
        if arch.startswith("gemma") and key.endswith("norm.weight"):
            values = values + 1
        stem, _, suffix = key.rpartition(".")
        name = names.get_name(stem)
        assert name is not None, f"gguf-py knows no {key} in {arch}"
        tensors[f"{name}.{suffix}"] = values
    rope = c.rope_parameters
    if rope.get("rope_type") == "longrope":
        for form in ("long", "short"):
            tensors[f"rope_factors_{form}.weight"] = np.asarray(rope[f"{form}_factor"], np.float32)
    return tensors


def write_gguf(path: Path, model: Any, arch: str, tensors: Mapping[str, Array] | None = None) -> Path:
    """Matrices in bfloat16 (exact), vectors in float32. tensors: in place of those of `gguf_tensors`."""
    writer = gguf.GGUFWriter(str(path), arch)
    for key, value in gguf_metadata(model, arch).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(f"{arch}.{key}", value)
    for name, values in (tensors or gguf_tensors(model, arch)).items():
        if values.ndim == 1:
            writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
        else:
            raw = np.ascontiguousarray(values).astype(ml_dtypes.bfloat16).view(np.uint8)
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
