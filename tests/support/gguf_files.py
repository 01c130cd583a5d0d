"""Small GGUF files made by gguf-py, not by us."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

HIDDEN, HEADS, KV_HEADS, FFN, LAYERS, VOCAB = 64, 4, 2, 96, 2, 32


def llama_tensors(seed: int = 0, tied: bool = True) -> dict[str, np.ndarray[Any, Any]]:
    """float32 tensors of a tiny Llama by their GGUF names (q and k rows in the file's order)."""
    rng = np.random.default_rng(seed)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {"token_embd": (VOCAB, HIDDEN), "output_norm": (HIDDEN,)} | (
        {} if tied else {"output": (VOCAB, HIDDEN)}
    )
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm": (HIDDEN,),
            f"blk.{i}.ffn_norm": (HIDDEN,),
            f"blk.{i}.attn_q": (HIDDEN, HIDDEN),
            f"blk.{i}.attn_k": (kv, HIDDEN),
            f"blk.{i}.attn_v": (kv, HIDDEN),
            f"blk.{i}.attn_output": (HIDDEN, HIDDEN),
            f"blk.{i}.ffn_gate": (FFN, HIDDEN),
            f"blk.{i}.ffn_up": (FFN, HIDDEN),
            f"blk.{i}.ffn_down": (HIDDEN, FFN),
        }
    return {f"{name}.weight": rng.standard_normal(shape, np.float32) * 0.2 for name, shape in shapes.items()}


def write_llama(
    path: Path,
    kind: Kind = Kind.Q4_1,
    seed: int = 0,
    tied: bool = True,
    extra: dict[str, np.ndarray[Any, Any]] | None = None,
    **metadata: Any,
) -> Path:
    """A whole tiny model; `metadata` adds or replaces `llama.` keys (dots written as __), `extra` tensors."""
    writer = gguf.GGUFWriter(str(path), "llama")
    keys: dict[str, Any] = {
        "block_count": LAYERS,
        "context_length": 256,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention__head_count": HEADS,
        "attention__head_count_kv": KV_HEADS,
        "attention__layer_norm_rms_epsilon": 1e-5,
        **metadata,
    }
    for key, value in keys.items():
        name = "llama." + key.replace("__", ".")
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_uint32(name, value)
    for name, values in (llama_tensors(seed, tied) | (extra or {})).items():
        if values.ndim == 1 or kind == Kind.F32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
