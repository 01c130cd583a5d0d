"""A random Llama of 40,960 tokens and three small layers, as transformers writes it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def save_small_llama(folder: Path) -> Path:
    """Large enough for prompts meant for the demo model, small enough for the slowest executor."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        vocab_size=40_960,
        max_position_embeddings=512,
        initializer_range=0.15,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
