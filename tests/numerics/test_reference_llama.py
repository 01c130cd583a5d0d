"""The reference (and with it spec, registry and checkpoint) against transformers on tiny random Llamas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lmdeploy.models.reference import Reference
from lmdeploy.models.registry import open_checkpoint

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "every head has its keys": {"num_key_value_heads": 4},
    "one key head": {"num_key_value_heads": 1},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "llama3 rope": {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "head_dim of its own": {"head_dim": 20},
    "gelu": {"hidden_act": "gelu_pytorch_tanh"},
    "large eps and theta": {
        "rms_norm_eps": 1e-3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
    },
}


def tiny_llama(seed: int = 0, **options: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **options})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Larger weights than the initial ones, so that every part leaves a trace in the logits.
            parameter.copy_(torch.randn_like(parameter) * (0.25 if parameter.dim() > 1 else 0.2))
            if "norm" in name:
                parameter.add_(1.0)
    return model


def expected_logits(model: LlamaForCausalLM, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(ids)[None]).logits[0].numpy()


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    model = tiny_llama(**CASES[case])
    model.save_pretrained(tmp_path)
    ids = np.random.default_rng(1).integers(0, 96, 100)
    ours = Reference(open_checkpoint(tmp_path)).logits(ids)
    expected = expected_logits(model, ids)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5 * float(np.abs(expected).max()))


def test_pieces_with_a_past_equal_the_whole(tmp_path: Path) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    ids, past = np.arange(30) * 7 % 96, []
    reference = Reference(open_checkpoint(tmp_path))
    pieces = [reference.logits(ids[a:b], past) for a, b in ((0, 1), (1, 20), (20, 21), (21, 30))]
    np.testing.assert_allclose(np.concatenate(pieces), expected_logits(model, ids), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kind", ["linear", "llama3"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_old_files_spell_rope_in_two_fields(kind: str, key: str, tmp_path: Path) -> None:
    scaling = {"factor": 4.0} if kind == "linear" else {k: v for k, v in LLAMA3.items() if k != "rope_type"}
    model = tiny_llama(rope_parameters={**scaling, "rope_type": kind, "rope_theta": 2000.0})
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 2000.0, "rope_scaling": {**scaling, key: kind}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids = np.arange(100) % 96
    ours = Reference(open_checkpoint(tmp_path)).logits(ids)
    np.testing.assert_allclose(ours, expected_logits(model, ids), rtol=1e-5, atol=2e-5)
