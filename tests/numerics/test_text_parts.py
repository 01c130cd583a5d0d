"""Language models inside larger ones: the text part of tiny image models, against transformers on text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from family_executors import EXECUTORS
from family_models import SIZES, Array, bfloat16, expected_logits, write_hf

from lmdeploy.errors import ModelError
from lmdeploy.models.registry import load_spec, open_checkpoint

IDS = np.random.default_rng(5).integers(3, 120, 60).astype(np.int32)
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 56, "patch_size": 14,
}  # fmt: skip
WHOLES: dict[str, dict[str, Any]] = {
    "Gemma3": {
        "text": {"sliding_window": 24, "query_pre_attn_scalar": 16, "num_hidden_layers": 7},
        "tied": True,
    },
    "Mistral3": {"text": {"model_type": "mistral", "sliding_window": None}, "tied": False},
}


def whole(name: str) -> Any:
    """A model with a vision tower; every parameter is random and rounded to bfloat16."""
    options = {"text_config": {**SIZES, **WHOLES[name]["text"]}, "vision_config": VISION}
    if name == "Gemma3":
        options["mm_tokens_per_image"] = 4
    made = getattr(transformers, f"{name}Config")(**options, tie_word_embeddings=WHOLES[name]["tied"])
    made._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForConditionalGeneration")(made).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            size = 1.2 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.2
            size /= SIZES["hidden_size"] ** 0.5 if name == "Gemma3" and "embed_tokens" in key else 1.0
            values = torch.randn(parameter.shape, generator=generator) * size
            values += 1.0 if "norm" in key and name != "Gemma3" else 0.0
            parameter.copy_(values.bfloat16().float())
    return model


def described(model: Any) -> dict[str, Any]:
    config = json.loads(model.config.to_json_string(use_diff=False))
    return {**config, "architectures": [type(model).__name__]}


def old_names(tensors: dict[str, Array]) -> dict[str, Array]:
    """As files before transformers 4.52 have it: the part's name in front of all that is in it."""
    result = {}
    for key, values in tensors.items():
        if key.startswith("model.language_model."):
            key = "language_model.model." + key.removeprefix("model.language_model.")
        elif key == "lm_head.weight":
            key = "language_model.lm_head.weight"
        result[key.removeprefix("model.")] = values
    return result


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", WHOLES)
def test_the_text_part_equals_transformers(name: str, executor: str, tmp_path: Path) -> None:
    case, model = EXECUTORS[executor], whole(name)
    wanted = expected_logits(model, IDS)
    assert wanted.std() > 0.1
    checkpoint = open_checkpoint(write_hf(tmp_path, described(model), bfloat16(model)))
    (note,) = checkpoint.notes
    assert note == f"only the language model of {name}ForConditionalGeneration is read: texts, no images"
    compute = case.make(checkpoint, checkpoint.spec.for_length(len(IDS)))
    assert case.error(compute(IDS, [40] + [1] * 20), wanted) < case.tolerance


@pytest.mark.parametrize("name", WHOLES)
def test_both_spellings_name_the_same_tensors(name: str, tmp_path: Path) -> None:
    model = whole(name)
    tensors, config = bfloat16(model), described(model)
    new = open_checkpoint(write_hf(tmp_path / "new", config, tensors))
    old = open_checkpoint(write_hf(tmp_path / "old", config, old_names(tensors)))
    assert new.names() == old.names()
    assert all(np.array_equal(new.read(x), old.read(x)) for x in new.names())  # type: ignore[arg-type]
    tensors["model.language_model.layers.0.mlp.router.weight"] = np.ones((4, 4), np.float32)
    with pytest.raises(
        ModelError, match=r"'model\.language_model\.layers\.0\.mlp\.router\.weight' has no place"
    ):
        open_checkpoint(write_hf(tmp_path / "extra", config, tensors))


def test_a_published_text_config_that_leaves_defaults_out(tmp_path: Path) -> None:
    """text_config of Gemma 3 4B as published: six fields."""
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = load_spec(tmp_path)
    full = transformers.Gemma3TextConfig(**text)
    last = spec.layers[5].attention
    assert (spec.vocab_size, len(spec.layers), spec.tie_embeddings) == (full.vocab_size, 34, True)
    assert (last.num_heads, last.num_kv_heads, last.head_dim) == (8, 4, 256)
    assert (last.rope and (last.rope.kind, last.rope.factor, last.rope.theta)) == ("linear", 8.0, 1e6)
    assert spec.layers[0].attention.window == 1024


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"text_config": None}, "text_config is missing, which a Mistral3ForConditionalGeneration must have"),
        ({"text_config": 3}, "text_config is 3; an object is expected"),
        (
            {"text_config": {"model_type": "ministral3"}},
            "text_config: model_type is 'ministral3', which is not supported in a Mistral3For",
        ),
        ({"text_config": {"model_type": "mistral"}}, "text_config: hidden_size is missing"),
        (
            {"architectures": ["LlavaForConditionalGeneration"]},
            "'LlavaForConditionalGeneration' is not supported",
        ),
    ],
)
def test_wholes_that_are_not_read_are_refused_by_name(change: Any, words: str, tmp_path: Path) -> None:
    config = {"architectures": ["Mistral3ForConditionalGeneration"], **change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as caught:
        load_spec(tmp_path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
