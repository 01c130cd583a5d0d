"""Perplexity, KL and agreement against transformers in float64 and NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lmdeploy.models.registry import open_checkpoint
from lmdeploy.quality.divergence import compare


def write_models(folder: Path) -> list[Any]:
    """Two models of one shape: random weights, and the same disturbed."""
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    first = LlamaForCausalLM(config)
    first.save_pretrained(folder / "first")
    with torch.no_grad():
        for weight in first.parameters():
            weight += 0.05 * torch.randn_like(weight)
    first.save_pretrained(folder / "second")
    return [
        LlamaForCausalLM.from_pretrained(folder / name, dtype=torch.float64) for name in ("first", "second")
    ]


def logs(model: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].numpy()
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def test_figures_are_those_of_float64(tmp_path: Path) -> None:
    models = write_models(tmp_path)
    rng = np.random.default_rng(0)
    windows = [rng.integers(0, 300, n).tolist() for n in (40, 300, 7)]
    loss: list[list[float]] = [[], []]
    kl: list[float] = []
    agrees: list[bool] = []
    for ids in windows:
        p, q = (logs(model, ids)[:-1] for model in models)
        for found, log in zip(loss, (p, q), strict=True):
            found += [-log[i, ids[i + 1]] for i in range(len(ids) - 1)]
        kl += (np.exp(p) * (p - q)).sum(-1).tolist()
        agrees += (p.argmax(-1) == q.argmax(-1)).tolist()
    checkpoints = [open_checkpoint(tmp_path / name) for name in ("first", "second")]
    told: list[int] = []
    found = compare(checkpoints[0], checkpoints[1:], windows, lambda _, done, work: told.append(work - done))
    assert told[-1] == 0 and told == sorted(told, reverse=True)
    for one, expected in zip(found, loss, strict=True):
        assert np.allclose(one.loss, expected, rtol=1e-4, atol=1e-4)
    assert found[1].kl is not None and np.allclose(found[1].kl, kl, rtol=1e-3, atol=1e-5)
    assert np.isclose(found[1].perplexity, np.exp(np.mean(loss[1])), rtol=1e-4)
    assert np.isclose(found[1].top1, np.mean(agrees), atol=2 / len(agrees))
    assert found[0].mean_kl == 0.0 and found[0].top1 == 1.0


def test_a_model_is_no_distance_from_itself(tmp_path: Path) -> None:
    write_models(tmp_path)
    both = [open_checkpoint(tmp_path / "first") for _ in range(2)]
    found = compare(both[0], both[1:], [[1, 2, 3, 4, 5]])
    assert found[1].mean_kl == 0.0 and found[1].top1 == 1.0 and found[1].p99_kl == 0.0
