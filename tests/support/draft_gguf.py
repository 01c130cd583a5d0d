"""A tiny GGUF model of random weights with another file's vocabulary: a draft model that knows nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, HEADS, FFN, LAYERS = 64, 2, 128, 2


def write_draft(path: Path, like: Path, seed: int = 0) -> Path:
    """Two small layers, tied head, float32."""
    reader = gguf.GGUFReader(like)
    writer = gguf.GGUFWriter(str(path), "llama")
    for name, value in {
        "block_count": LAYERS,
        "context_length": 8192,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": HEADS,
    }.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for name, field in reader.fields.items():
        if name.startswith("tokenizer."):
            kind = field.types[0]
            sub_type = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, sub_type)
    rng = np.random.default_rng(seed)
    for name, shape in _shapes(len(reader.fields["tokenizer.ggml.tokens"].contents())).items():
        values = rng.standard_normal(shape) * 0.1 if len(shape) > 1 else np.ones(shape)
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _shapes(vocab: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, Any] = {"token_embd.weight": (vocab, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        for name, shape in {
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (HIDDEN, HIDDEN),
            "attn_v": (HIDDEN, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (FFN, HIDDEN),
            "ffn_up": (FFN, HIDDEN),
            "ffn_down": (HIDDEN, FFN),
        }.items():
            shapes[f"blk.{layer}.{name}.weight"] = shape
    return shapes
