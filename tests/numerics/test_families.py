"""Every family and feature against transformers in float32 on bfloat16-rounded weights, on every executor.

One row per family or feature; whole prompts and single tokens; more tokens than every window and every
original length. Frequencies that depend on the length of a sequence are those of all the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_executors import EXECUTORS
from family_models import (
    bfloat16,
    config_of,
    expected_logits,
    gguf_tensors,
    old_spelling,
    tiny,
    write_gguf,
    write_hf,
)
from family_rows import ROWS, Row

from lmdeploy.models.registry import FAMILIES, load_spec, open_checkpoint

IDS = np.random.default_rng(3).integers(0, 130, 90).astype(np.int32)
STEPS = [50, 32] + [1] * 8
FILES = [(name, "hf") for name in ROWS] + [(name, "gguf") for name, row in ROWS.items() if row.gguf]


def write(row: Row, model: Any, form: str, path: Path) -> Path:
    if form == "gguf":
        assert row.gguf is not None
        return write_gguf(path / "m.gguf", model, row.gguf)
    tensors, config = bfloat16(model), config_of(model)
    if row.rename is None:
        return write_hf(path / "hf", config, tensors)
    config = {**old_spelling(config, "type"), **row.describe}
    del config["attention_bias"], config["mlp_bias"]
    return write_hf(path / "hf", config, row.rename(tensors, model.config))


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Threads cost more than they give on matrices this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("name", "form"), FILES)
def test_logits_equal_transformers(name: str, form: str, executor: str, tmp_path: Path) -> None:
    row, case = ROWS[name], EXECUTORS[executor]
    model = tiny(row.model, **row.options)
    checkpoint = open_checkpoint(write(row, model, form, tmp_path))
    wanted = expected_logits(model, IDS)
    assert wanted.std() > 0.1
    compute = case.make(checkpoint, checkpoint.spec.for_length(len(IDS)))
    assert case.error(compute(IDS, [len(IDS)]), wanted) < case.tolerance
    assert case.error(compute(IDS, STEPS), wanted) < case.tolerance


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_tied_model_may_carry_its_head(executor: str, tmp_path: Path) -> None:
    """Files of tied models with and without the output matrix; it is stored once."""
    case, model = EXECUTORS[executor], tiny("Llama", tie_word_embeddings=True)
    tensors, wanted = bfloat16(model), expected_logits(model, IDS)
    for head in ({}, {"lm_head.weight": tensors["model.embed_tokens.weight"]}):
        checkpoint = open_checkpoint(
            write_hf(tmp_path / str(len(head)), config_of(model), {**tensors, **head})
        )
        assert checkpoint.spec.tie_embeddings
        assert "lm_head.weight" not in checkpoint.names()
        compute = case.make(checkpoint, checkpoint.spec)
        assert case.error(compute(IDS, [len(IDS)]), wanted) < case.tolerance


@pytest.mark.parametrize("executor", EXECUTORS)
def test_weights_beyond_float16_do_not_overflow(executor: str, tmp_path: Path) -> None:
    case, model = EXECUTORS[executor], tiny("Llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[3, 5] = 99840.0  # 1e5 in bfloat16
    checkpoint = open_checkpoint(write_hf(tmp_path, config_of(model), bfloat16(model)))
    wanted = expected_logits(model, IDS)
    assert case.error(case.make(checkpoint, checkpoint.spec)(IDS, STEPS), wanted) < case.tolerance


@pytest.mark.parametrize(("name", "arch"), [("glm", "chatglm"), ("glm4", "glm4")])
def test_gguf_files_with_one_matrix_for_queries_keys_and_values(name: str, arch: str, tmp_path: Path) -> None:
    """As converters of GLM write it that start from the model's own files: all queries, keys, values."""
    model = tiny(ROWS[name].model, **{**ROWS[name].options, "attention_bias": True})
    apart = gguf_tensors(model, arch)
    fused = {k: v for k, v in apart.items() if not any(f"attn_{x}." in k for x in "qkv")}
    for i in range(model.config.num_hidden_layers):
        for kind in ("weight", "bias"):
            parts = [apart[f"blk.{i}.attn_{x}.{kind}"] for x in "qkv"]
            fused[f"blk.{i}.attn_qkv.{kind}"] = np.concatenate(parts)
    one = open_checkpoint(write_gguf(tmp_path / "one.gguf", model, arch, fused))
    three = open_checkpoint(write_gguf(tmp_path / "three.gguf", model, arch, apart))
    assert one.spec == three.spec
    assert all(np.array_equal(one.read(x), three.read(x)) for x in three.names())  # type: ignore[arg-type]


def test_every_family_has_a_row() -> None:
    families = {name.split(",")[0] for name in ROWS}
    assert families >= {family.name for family in FAMILIES}
    forms = {row.gguf for row in ROWS.values()}
    assert forms >= {arch for family in FAMILIES for arch in family.gguf_architectures}


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("name", [n for n, row in ROWS.items() if row.rename is None])
def test_old_files_mean_the_same(name: str, key: str, tmp_path: Path) -> None:
    """Rotation in two fields, and which layers have windows or no rotation left to the defaults."""
    row = ROWS[name]
    model = tiny(row.model, **row.options)
    config, tensors = config_of(model), bfloat16(model)
    new = load_spec(write_hf(tmp_path / "new", config, tensors))
    old = old_spelling(config, key)
    for listed in ("layer_types", "no_rope_layers"):
        if listed not in row.options:
            old.pop(listed, None)
    assert load_spec(write_hf(tmp_path / "old", old, tensors)) == new
