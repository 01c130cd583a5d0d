"""Quantised Hugging Face directories, packed value by value from the public layouts; no code of the project.

Every packer takes codes [N, K], zeros and scales [N, groups] as w = (code - zero) * scale has them, and
returns the stored tensors of one matrix by their last names.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]
Parts = dict[str, Array]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_DTYPES = {
    **{"float16": "F16", "float32": "F32", "bfloat16": "BF16", "int32": "I32", "int64": "I64"},
    **{"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "int8": "I8", "uint8": "U8"},
}


def save(path: Path, tensors: dict[str, Array]) -> None:
    """A safetensors file: length of the header, header, data (the library cannot write 8-bit floats)."""
    header, data = {}, b""
    for name, value in tensors.items():
        raw = np.ascontiguousarray(value).tobytes()
        header[name] = {
            "dtype": _DTYPES[value.dtype.name],
            "shape": list(value.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def words(values: Array, bits: int, order: tuple[int, ...] | None = None) -> Array:
    """[rows, n] -> int32 [rows, n * bits / 32]; value order[i] of a word lies i * bits up."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    result = np.zeros((values.shape[0], values.shape[1] // per_word), np.uint64)
    for i, place in enumerate(order):
        result |= values[:, place::per_word].astype(np.uint64) << np.uint64(i * bits)
    return result.astype(np.uint32).view(np.int32)


def pack_awq(codes: Array, zeros: Array, scales: Array) -> Parts:
    return {
        "qweight": words(codes.T, 4, AWQ_ORDER),
        "qzeros": words(zeros.T, 4, AWQ_ORDER),
        "scales": scales.T.copy(),
    }


def pack_gptq(bits: int = 4, stored_less: int = 1, g_idx: Array | None = None) -> Callable[..., Parts]:
    """stored_less: what version 1 takes off a zero point. g_idx: the group of each input (act-order); codes
    are given in the order of the inputs."""

    def pack(codes: Array, zeros: Array, scales: Array) -> Parts:
        k, groups = codes.shape[1], scales.shape[1]
        return {
            "qweight": words(codes, bits).T.copy(),
            "qzeros": words(zeros.T.astype(np.int64) - stored_less, bits),
            "scales": scales.T.copy(),
            "g_idx": np.asarray(np.arange(k) // (k // groups) if g_idx is None else g_idx, np.int32),
        }

    return pack


def pack_compressed(
    bits: int = 4, symmetric: bool = False, g_idx: Array | None = None
) -> Callable[..., Parts]:
    def pack(codes: Array, zeros: Array, scales: Array) -> Parts:
        parts = {
            "weight_packed": words(codes, bits),
            "weight_scale": scales,
            "weight_shape": np.array(codes.shape, np.int64),
        }
        if not symmetric:
            parts["weight_zero_point"] = words(zeros.T, bits).T.copy()
        if g_idx is not None:
            parts["weight_g_idx"] = np.asarray(g_idx, np.int32)
        return parts

    return pack


def store_bytes(symmetric: bool = True, shape: tuple[int, ...] | None = None) -> Callable[..., Parts]:
    """compressed-tensors' W8A8: codes and zero points less 128 as int8. shape: of the scales in the file."""

    def store(codes: Array, zeros: Array, scales: Array) -> Parts:
        count = int(np.prod(shape)) if shape is not None else scales.size
        form = scales.shape if shape is None else shape
        parts = {
            "weight": (codes.astype(np.int16) - 128).astype(np.int8),
            "weight_scale": scales.reshape(-1)[:count].reshape(form),
        }
        if not symmetric:
            parts["weight_zero_point"] = (
                (zeros.astype(np.int16) - 128).astype(np.int8).ravel()[:count].reshape(form)
            )
        return parts

    return store


def act_order(k: int, group: int, seed: int) -> Array:
    """Group of each input when inputs were quantised in a random order."""
    result = np.empty(k, np.int64)
    result[np.random.default_rng(seed).permutation(k)] = np.arange(k) // group
    return result


def random_matrix(
    n: int, k: int, group: int, bits: int = 4, symmetric: bool = False, seed: int = 0, least_zero: int = 0
) -> tuple[Array, Array, Array]:
    """Codes [n, k], zeros and float16 scales [n, k / group]; weights about 1 / sqrt(k)."""
    rng = np.random.default_rng(seed)
    top, middle = 1 << bits, 1 << bits - 1
    codes = rng.integers(0, top, (n, k)).astype(np.uint8)
    shape = (n, k // group)
    zeros = rng.integers(least_zero, top, shape) if not symmetric else np.full(shape, middle)
    scales = (rng.uniform(0.5, 1.0, shape) * 2 / middle * k**-0.5).astype(np.float16)
    return codes, zeros.astype(np.uint8), scales


def weights(codes: Array, zeros: Array, scales: Array, g_idx: Array | None = None) -> Array:
    """float32 [N, K] by the formula."""
    k, groups = codes.shape[1], scales.shape[1]
    group_of = np.arange(k) // (k // groups) if g_idx is None else g_idx
    difference = codes.astype(np.int32) - zeros.astype(np.int32)[:, group_of]
    return difference.astype(np.float32) * scales.astype(np.float32)[:, group_of]


HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS, VOCAB = 256, 8, 4, 32, 512, 2, 96
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "mlp_bias": True,
    "torch_dtype": "float16",
}
LINEARS = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (FFN, HIDDEN),
    "mlp.up_proj": (FFN, HIDDEN),
    "mlp.down_proj": (HIDDEN, FFN),
}


@dataclass
class Model:
    """`stored`: tensors of the file; `dense`: float32 values of every weight by its unquantised name."""

    stored: dict[str, Array] = field(default_factory=dict)
    dense: dict[str, Array] = field(default_factory=dict)

    def plain(self, name: str, value: Array) -> None:
        self.stored[name], self.dense[name] = value, value.astype(np.float32)

    def write(self, path: Path, quantization: dict[str, Any] | None, **config: Any) -> Path:
        path.mkdir(parents=True, exist_ok=True)
        described = {**CONFIG, **config}
        if quantization is not None:
            described["quantization_config"] = quantization
        (path / "config.json").write_text(json.dumps(described))
        save(path / "model.safetensors", self.stored)
        return path


def llama(
    quantise: Callable[[str, int, int, int], tuple[Parts, Array] | None],
    vocab: int = VOCAB,
    hidden: int = HIDDEN,
    linears: dict[str, tuple[int, int]] = LINEARS,
) -> Model:
    """A tiny Llama. `quantise(name, n, k, seed)` gives stored parts and values of a linear, or None: float16.

    Every linear has a bias.
    """
    model, rng = Model(), np.random.default_rng(1)

    def half(*shape: int) -> Array:
        """float16 values that bfloat16 has too, so that nothing is rounded on the way."""
        values = rng.standard_normal(shape) * (1.2 * shape[-1] ** -0.5 if len(shape) > 1 else 0.2)
        return values.astype(ml_dtypes.bfloat16).astype(np.float16)

    model.plain("model.embed_tokens.weight", half(vocab, hidden))
    model.plain("lm_head.weight", half(vocab, hidden))
    model.plain("model.norm.weight", half(hidden) + np.float16(1))
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        model.plain(p + "input_layernorm.weight", half(hidden) + np.float16(1))
        model.plain(p + "post_attention_layernorm.weight", half(hidden) + np.float16(1))
        for number, (name, (n, k)) in enumerate(linears.items()):
            model.plain(f"{p}{name}.bias", half(n))
            packed = quantise(p + name, n, k, 100 * i + number)
            if packed is None:
                model.plain(f"{p}{name}.weight", half(n, k))
                continue
            model.stored |= {f"{p}{name}.{part}": value for part, value in packed[0].items()}
            model.dense[f"{p}{name}.weight"] = packed[1]
    return model


def e4m3(values: Array) -> Array:
    return values.astype(ml_dtypes.float8_e4m3fn)
