"""A description that ties the matrices beside files with an output matrix: what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import transformers
from family_models import bfloat16, config_of, expected_logits, tiny, write_hf
from family_rows import fused_wqkv

from lmdeploy.models.reference import Reference
from lmdeploy.models.registry import open_checkpoint

IDS = [5, 77, 1, 128, 40, 3]


def directory(path: Path, head: np.ndarray[Any, Any] | None, dtype: Any = None) -> Path:
    """A tied Llama; `head`: lm_head.weight of its file."""
    model = tiny("Llama", tie_word_embeddings=True)
    tensors = bfloat16(model)
    if head is not None:
        tensors["lm_head.weight"] = head.astype(dtype or ml_dtypes.bfloat16)
    return write_hf(path, config_of(model), tensors)


def other_head() -> np.ndarray[Any, Any]:
    return np.random.default_rng(9).standard_normal((130, 72)) * 0.2


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_a_head_unlike_the_embedding_is_used(dtype: Any, tmp_path: Path) -> None:
    path = directory(tmp_path, other_head(), dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()
    checkpoint = open_checkpoint(path)
    np.testing.assert_allclose(Reference(checkpoint).logits(IDS), expected_logits(model, IDS), atol=1e-3)
    assert not checkpoint.spec.tie_embeddings
    assert "tie_word_embeddings is true, but 'lm_head.weight' is unlike" in "".join(checkpoint.notes)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_an_equal_head_is_the_embedding(dtype: Any, tmp_path: Path) -> None:
    embedding = bfloat16(tiny("Llama", tie_word_embeddings=True))["model.embed_tokens.weight"]
    checkpoint = open_checkpoint(directory(tmp_path, embedding.astype(np.float32), dtype))
    assert (checkpoint.spec.tie_embeddings, checkpoint.notes) == (True, ())
    assert "lm_head.weight" not in checkpoint.names()


def test_the_head_has_the_name_of_its_family(tmp_path: Path) -> None:
    """InternLM2 calls it output.weight."""
    model = tiny("Llama", tie_word_embeddings=True)
    tensors = fused_wqkv({**bfloat16(model), "lm_head.weight": other_head().astype(np.float32)}, model.config)
    config = {**config_of(model), "architectures": ["InternLM2ForCausalLM"], "bias": False}
    config["model_type"] = "internlm2"
    for key in ("attention_bias", "mlp_bias"):
        del config[key]
    checkpoint = open_checkpoint(write_hf(tmp_path, config, tensors))
    assert np.array_equal(checkpoint.read("lm_head.weight"), tensors["output.weight"])
