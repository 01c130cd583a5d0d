"""Quantised directories of families that store matrices joined, turned, tied, with biases or more norms."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from family_models import bfloat16, config_of, tiny, write_hf
from family_rows import ROWS
from lite_cases import logits, quantise
from tiny_model import write_tiny_model

from lmdeploy.lite.rounding import full_grid
from lmdeploy.models.registry import open_checkpoint
from lmdeploy.quant.scheme import WeightScheme
from lmdeploy.quant.tensors import GroupedTensor

NAMES = ["llama, biases, tied", "qwen2", "phi3", "phi3, longrope", "glm4", "internlm2", "gemma2"]
NAMES += ["gemma3", "granite", "olmo2"]
IDS = list(range(3, 40))


def directory(name: str, folder: Path) -> Path:
    """A tiny model of the family, with a byte-level tokenizer."""
    row = ROWS[name]
    model = tiny(row.model, **row.options)
    tensors = bfloat16(model)
    if row.rename is not None:
        tensors = row.rename(tensors, model.config)
    path = write_hf(folder / "model", {**config_of(model), **row.describe}, tensors)
    write_tiny_model(folder / "tokens")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "tokens" / file).rename(path / file)
    return path


@pytest.mark.parametrize("name", NAMES)
def test_each_matrix_is_rounded_as_it_is_and_found_where_it_was(name: str, tmp_path: Path) -> None:
    """Data-free, so that every matrix can be rounded beside: joined matrices come apart again, rows in their
    places, and all else is bit for bit what it was."""
    model = directory(name, tmp_path)
    assert quantise("auto_gptq", model, tmp_path / "w", "--calib-samples", "0", "--w-group-size", "32") == 0
    before, after = open_checkpoint(model), open_checkpoint(tmp_path / "w")
    assert before.spec == after.spec and before.names() == after.names()
    for tensor in sorted(before.names()):
        old, new = before.read(tensor), after.read(tensor)
        assert not isinstance(old, GroupedTensor)
        if isinstance(new, GroupedTensor):
            weight = torch.from_numpy(old.astype(np.float32))
            grid = full_grid(weight, WeightScheme(4, 32))
            np.testing.assert_array_equal(new.dequantize(), grid.values(grid.codes(weight)).numpy())
        else:
            assert new.dtype == old.dtype and np.array_equal(new, old)
        assert isinstance(new, GroupedTensor) == ("_proj.weight" in tensor)
    index = json.loads((tmp_path / "w" / "model.safetensors.index.json").read_text())["weight_map"]
    assert sum(n.endswith(".qweight") for n in index) == len(
        {before.stored_name(n) for n in before.names() if "_proj.weight" in n}
    )


@pytest.mark.parametrize("name", NAMES)
def test_scales_of_each_family_keep_its_function(name: str, tmp_path: Path) -> None:
    """8 bits, so that a scale folded wrongly would be the larger error by far."""
    model = directory(name, tmp_path)
    text = tmp_path / "a.txt"
    text.write_text("".join(chr(65 + i % 50) for i in range(400)))
    flags = ["--w-bits", "8", "--method", "awq+gptq", "--w-group-size", "32", "--calib-dataset", str(text)]
    assert quantise("auto_gptq", model, tmp_path / "w", *flags) == 0
    old, new = logits(model, IDS), logits(tmp_path / "w", IDS)
    assert np.abs(new - old).max() < 0.1 * np.abs(old).max()
