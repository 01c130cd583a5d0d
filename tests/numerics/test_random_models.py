"""Benchmark models with random weights are sound: others read them, values are small, tokenizers agree."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from lmdeploy.models.registry import open_checkpoint
from lmdeploy.quant.tensors import GroupedTensor
from lmdeploy.text.tokenizer import load_tokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import random_models

TEXT = "Good morning, twenty-two pale horses!\n"


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every format of a small shape, by format."""
    public = random_models.SHAPES["0.5b" if request.param == "qwen2" else "1b"]
    sizes = dict(hidden=256, intermediate=384, layers=3, heads=4, kv_heads=2, vocab=1024, ids=1000)
    shape = replace(public, **sizes, tied=request.param == "qwen2")
    out = tmp_path_factory.mktemp("random")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_models, "SHAPES", {"tiny": shape})
        return {form: random_models.make(out, "tiny", form) for form in random_models.FORMATS}


@pytest.mark.parametrize("form", random_models.FORMATS)
def test_values_of_every_matrix_are_of_usual_size(models: dict[str, Path], form: str) -> None:
    checkpoint = open_checkpoint(models[form])
    for name in checkpoint.names():
        tensor: Any = checkpoint.read(name)
        values = tensor.dequantize() if isinstance(tensor, GroupedTensor) else tensor.astype(np.float32)
        if values.ndim == 2:
            assert 0.015 < float(np.sqrt(np.mean(values**2))) < 0.06, name
    checkpoint.close()


def test_transformers_reads_the_bf16_directory(models: dict[str, Path]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(models["bf16"], dtype=torch.bfloat16)
    ours = open_checkpoint(models["bf16"])
    assert np.array_equal(
        model.model.layers[1].mlp.up_proj.weight.detach().float().numpy(),
        np.asarray(ours.read("layers.1.ffn.up_proj.weight")).astype(np.float32),
    )
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()


def test_kinds_follow_llama_cpp(models: dict[str, Path]) -> None:
    file = next(models["q4_k_m"].glob("*.gguf"))
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(file).tensors}
    assert kinds["blk.0.attn_q.weight"] == "Q4_K"
    assert kinds["blk.2.attn_v.weight"] == "Q6_K"  # in the last eighth of the layers
    assert kinds["blk.0.ffn_down.weight"] == "Q5_0"  # 384 inputs are no whole number of blocks of 256
    tied = "output.weight" not in kinds
    assert kinds["token_embd.weight" if tied else "output.weight"] == "Q6_K"


def test_both_tokenizers_agree_and_give_the_text_back(models: dict[str, Path]) -> None:
    of_json, of_gguf = load_tokenizer(models["awq"]), load_tokenizer(models["q4_0"])
    ids = of_json.encode(TEXT)
    assert ids == of_gguf.encode(TEXT) and of_gguf.decode(ids) == TEXT
    assert len(ids) < len(TEXT)
    assert of_json.eos_ids == of_gguf.eos_ids | {1000}
    theirs = transformers.AutoTokenizer.from_pretrained(models["bf16"])
    assert theirs(TEXT, add_special_tokens=False)["input_ids"] == ids
