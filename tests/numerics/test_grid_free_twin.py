"""The grid-free twin computes the same function by other weights; transformers is the judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from family_models import bfloat16, config_of, expected_logits, tiny, write_hf
from lite.twin import HIGH, LOW, make_twin
from safetensors.numpy import load_file

IDS = np.random.default_rng(1).integers(3, 130, 40)


def twin_of(name: str, folder: Path, **options: Any) -> tuple[Any, Path, Path]:
    model = tiny(name, **options)
    source = write_hf(folder / "source", config_of(model), bfloat16(model))
    (source / "tokenizer.json").write_text("{}")
    return model, source, make_twin(source, folder / "twin", seed=3, dtype="float32")


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "Gemma", "Gemma2"])
def test_logits_are_unchanged(name: str, tmp_path: Path) -> None:
    """Grouped-query heads, biases, q and k norms, an offset of the norms, norms after the blocks."""
    model, _, twin = twin_of(name, tmp_path)
    again = getattr(transformers, f"{name}ForCausalLM").from_pretrained(
        twin, dtype="float32", attn_implementation="eager"
    )
    wanted = expected_logits(model, IDS)
    np.testing.assert_allclose(expected_logits(again.eval(), IDS), wanted, atol=2e-5 * np.abs(wanted).max())


def test_every_matrix_leaves_its_grid(tmp_path: Path) -> None:
    """Each entry of a matrix is multiplied by at most the square of the widest scale, and most by others."""
    _, source, twin = twin_of("Llama", tmp_path)
    before, after = load_file(source / "model.safetensors"), load_file(twin / "model.safetensors")
    assert before.keys() == after.keys()
    for name, values in before.items():
        ratio = after[name].astype(np.float64) / values.astype(np.float64)
        if "_proj" not in name:
            continue
        assert (LOW / HIGH) * 0.999 < ratio.min() < 0.9 and 1.1 < ratio.max() < (HIGH / LOW) * 1.001, name
        assert len(np.unique(np.round(ratio, 4))) >= 32, name  # of v to o: 2 heads of 16


def test_a_directory_is_whole_and_the_seed_decides(tmp_path: Path) -> None:
    _, source, twin = twin_of("Llama", tmp_path)
    assert {file.name for file in twin.iterdir()} == {file.name for file in source.iterdir()}
    same, other = (make_twin(source, tmp_path / f"seed{seed}", seed, "float32") for seed in (3, 4))
    weights = [(folder / "model.safetensors").read_bytes() for folder in (twin, same, other)]
    assert weights[0] == weights[1] != weights[2]


def test_fused_matrices_are_refused(tmp_path: Path) -> None:
    model = tiny("Phi3")
    source = write_hf(tmp_path / "source", config_of(model), bfloat16(model))
    with pytest.raises(ValueError, match="several matrices share one tensor"):
        make_twin(source, tmp_path / "twin")
    assert not (tmp_path / "twin").exists()
