"""The comparison's judge against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_models import bfloat16, config_of, tiny, write_hf
from lite.evaluate import Judge, facts_of

WINDOWS = [np.random.default_rng(seed).integers(3, 130, 40).astype(np.int32) for seed in (1, 2)]
SKIP = 8


def log_probabilities(model: Any) -> torch.Tensor:
    """float64 [all scored positions, vocab]."""
    with torch.no_grad():
        found = [model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, SKIP:-1] for ids in WINDOWS]
    return torch.log_softmax(torch.cat(found).double(), -1)


def test_figures_are_those_of_transformers(tmp_path: Path) -> None:
    first, second = tiny("Llama"), tiny("Llama")
    with torch.no_grad():
        for parameter in second.model.layers.parameters():
            parameter.copy_((parameter * 1.05).bfloat16().float())
    folders = [write_hf(tmp_path / n, config_of(m), bfloat16(m)) for n, m in (("a", first), ("b", second))]
    found = Judge(folders[0], WINDOWS, SKIP).judge(folders[1])
    wanted, got = log_probabilities(first), log_probabilities(second)
    ids = torch.from_numpy(np.concatenate([w[SKIP + 1 :] for w in WINDOWS]).astype(np.int64))
    kl = (wanted.exp() * (wanted - got)).sum(-1)
    assert found["kl"] == pytest.approx(float(kl.mean()), rel=1e-3) and found["kl"] > 1e-4
    assert found["kl_p99"] == pytest.approx(float(np.quantile(kl.numpy(), 0.99)), rel=1e-3)
    assert found["perplexity"] == pytest.approx(float((-got.gather(1, ids[:, None])).mean().exp()), rel=1e-4)
    assert found["same_top"] == pytest.approx(float((wanted.argmax(-1) == got.argmax(-1)).double().mean()))
    assert found["positions"] == len(kl)


def test_itself_is_at_no_distance(tmp_path: Path) -> None:
    model = tiny("Qwen2")
    folder = write_hf(tmp_path / "a", config_of(model), bfloat16(model))
    found = Judge(folder, WINDOWS, SKIP).judge(folder)
    assert found["kl"] == 0.0 and found["same_top"] == 1.0
    assert facts_of(folder)["bits_per_weight"] == 16.0
