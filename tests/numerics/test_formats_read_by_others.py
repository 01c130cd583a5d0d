"""Files of our writers through the package that defines compressed-tensors, loaded by transformers.

What rounds no activations gives the very logits of the values meant; W8A8 rounds them token by token there.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from native_case import relative_rms
from transformers import AutoModelForCausalLM
from written_models import (
    CENTRED,
    CENTRED8,
    CHANNELS,
    EIGHT,
    FOUR,
    MIXED,
    WHOLE,
    Schemes,
    expected_logits,
    logits_of,
    written,
)

CASES: dict[str, tuple[str, Schemes]] = {
    "4 bits": ("compressed-tensors", {"": FOUR}),
    "4 bits, symmetric, some kept": ("compressed-tensors", {"": CENTRED, "0.mlp.down_proj": None}),
    "8 bits": ("compressed-tensors", {"": EIGHT}),
    "mixed": ("compressed-tensors", MIXED),
    "output matrix in 8 bits": ("compressed-tensors", {"": CENTRED, "lm_head": CENTRED8}),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_equal(name: str, tmp_path: Path) -> None:
    model, quantization = written(*CASES[name], WHOLE)
    path = model.write(tmp_path, quantization, **WHOLE.config)
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert np.array_equal(logits_of(loaded), expected_logits(model, WHOLE))


def test_w8a8_rounds_activations(tmp_path: Path) -> None:
    model, quantization = written("w8a8", {"": CHANNELS}, WHOLE)
    path = model.write(tmp_path, quantization, **WHOLE.config)
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert 1e-3 < relative_rms(logits_of(loaded), expected_logits(model, WHOLE)) < 0.05
    weight = loaded.model.layers[0].mlp.up_proj.weight.detach().numpy()
    assert np.array_equal(weight, model.dense["model.layers.0.mlp.up_proj.weight"])
