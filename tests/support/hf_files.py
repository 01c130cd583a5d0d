"""Tiny Llamas as Hugging Face directories, written with the safetensors library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS, VOCAB = 24, 4, 2, 8, 40, 2, 16
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
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def hf_tensors(dtype: Any = np.float32, tied: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for i in range(LAYERS):
        parts = {
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (FFN, HIDDEN),
            "mlp.up_proj": (FFN, HIDDEN),
            "mlp.down_proj": (HIDDEN, FFN),
        }
        shapes |= {f"model.layers.{i}.{part}.weight": shape for part, shape in parts.items()}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def write_hf(
    path: Path, weights: dict[str, np.ndarray] | None = None, shards: int = 0, **config: Any
) -> Path:
    """A model directory; with `shards` above 0 an index and that many files."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    weights = hf_tensors() if weights is None else weights
    if not shards:
        save_file(weights, str(path / "model.safetensors"))
        return path
    names = sorted(weights)
    table = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for file in set(table.values()):
        save_file({n: weights[n] for n in names if table[n] == file}, str(path / file))
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return path
