"""Which rotation a description means where it says it twice, elsewhere, or not fully.

Reference: the frequencies and the factor that transformers computes from the same config.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from hf_files import CONFIG

from lmdeploy.errors import ModelError
from lmdeploy.models.registry import load_spec
from lmdeploy.models.rope import inverse_frequencies
from lmdeploy.models.spec import RopeSpec

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LISTS = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 5.0, 9.0]}
SIZES = {**CONFIG, "max_position_embeddings": 256}


def written(path: Path, **config: Any) -> Path:
    other = "architectures" in config
    kept = {k: v for k, v in SIZES.items() if k != "rope_theta" and not (other and k == "model_type")}
    (path / "config.json").write_text(json.dumps({**kept, **config}))
    return path


def rope_of(path: Path, **config: Any) -> RopeSpec:
    rope = load_spec(written(path, **config)).layers[0].attention.rope
    assert rope is not None
    return rope


def reference(path: Path) -> tuple[np.ndarray, float]:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(transformers.AutoConfig.from_pretrained(path))
    return rotary.inv_freq.double().numpy(), float(rotary.attention_scaling)


@pytest.mark.parametrize(
    "config",
    [
        {"rope_parameters": PLAIN, "rope_scaling": YARN},
        {"rope_parameters": {"rope_theta": 10000.0}, "rope_scaling": {**YARN, "rope_theta": 10000.0}},
        {"rope_parameters": {**PLAIN, "rope_theta": 5e5}, "rope_scaling": YARN, "rope_theta": 5e5},
        {"rope_parameters": {**YARN, "rope_theta": 1e4}, "rope_scaling": YARN},
        {"rope_parameters": PLAIN, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_parameters": PLAIN, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 64},
        {"rope_parameters": YARN, "original_max_position_embeddings": 32},
        {"rope_parameters": LLAMA3, "original_max_position_embeddings": 64},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 64},
        {"rope_scaling": {"factor": 4.0}},
        {"rope_scaling": {"factor": 4.0}, "rope_theta": 5e5},
    ],
)
def test_rotation_is_that_of_transformers(config: dict[str, Any], tmp_path: Path) -> None:
    rope = rope_of(tmp_path, **config)
    frequencies, factor = reference(tmp_path)
    assert np.allclose(inverse_frequencies(rope), frequencies, rtol=1e-6)
    assert rope.attention_factor == pytest.approx(factor)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"rope_parameters": {**PLAIN, "rope_theta": 1e6}, "rope_scaling": YARN},
            "rope_scaling and rope_parameters describe different rotations",
        ),
        (
            {"rope_parameters": {**YARN, "factor": 8.0}, "rope_scaling": YARN},
            "rope_scaling and rope_parameters describe different rotations",
        ),
        ({"rope_parameters": {"rope_type": None, "factor": 4.0}}, "rope_type names no kind of scaling"),
        ({"rope_parameters": {"rope_type": "", "factor": 4.0}}, "rope_type names no kind of scaling"),
        ({"rope_scaling": {"type": None, "factor": 4.0}}, "rope_type names no kind of scaling"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters: factor is missing"),
        ({"rope_scaling": {"type": "yarn", "factor": None}}, "rope_scaling: factor is missing"),
        ({"rope_parameters": LLAMA3}, "original_max_position_embeddings is missing"),
        ({"partial_rotary_factor": 0.75}, "partial_rotary_factor is 0.75, which changes the computation"),
        (
            {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
            "rope_parameters: partial_rotary_factor is 0.5, which changes the computation",
        ),
    ],
)
def test_what_means_no_rotation_is_refused(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        rope_of(tmp_path, **config)
    assert words in str(caught.value)


PARTIAL = {"GlmForCausalLM", "Glm4ForCausalLM", "Phi3ForCausalLM"}
WHOLE = {
    *("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM", "Olmo2ForCausalLM"),
    *("InternLM2ForCausalLM", "InternLM3ForCausalLM", "GemmaForCausalLM", "Gemma2ForCausalLM"),
    *("Gemma3ForCausalLM", "GraniteForCausalLM", "SmolLM3ForCausalLM", "SeedOssForCausalLM"),
}


@pytest.mark.parametrize("name", sorted(PARTIAL | WHOLE))
def test_a_share_of_a_head_is_turned_only_where_the_class_does_so(name: str, tmp_path: Path) -> None:
    config = {"architectures": [name], "partial_rotary_factor": 0.5}
    if name in PARTIAL:
        assert rope_of(tmp_path, **config).rotary_dim == 4
    else:
        with pytest.raises(ModelError, match=r"partial_rotary_factor is 0\.5"):
            rope_of(tmp_path, **config)


@pytest.mark.parametrize("name", sorted(PARTIAL | WHOLE - {"Gemma3ForCausalLM"}))
def test_rotations_by_layer_type_are_only_for_families_that_have_them(name: str, tmp_path: Path) -> None:
    nested = {"full_attention": {**YARN, "rope_theta": 5e5}}
    with pytest.raises(ModelError, match="full_attention describes one type of layer"):
        rope_of(tmp_path, architectures=[name], rope_parameters=nested)


def test_longrope_has_its_original_length_in_either_place(tmp_path: Path) -> None:
    """Phi3Config lets the number beside the object win."""
    rope = {"rope_type": "longrope", **LISTS, "original_max_position_embeddings": 64}
    for beside, original in (({}, 64), ({"original_max_position_embeddings": 32}, 32)):
        spec = rope_of(tmp_path, architectures=["Phi3ForCausalLM"], rope_parameters=rope, **beside)
        assert spec.original_max_position == original


def test_gemma_3_takes_scaling_beside_its_rotations_for_full_layers(tmp_path: Path) -> None:
    config = {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 6,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }  # fmt: skip
    ropes = [layer.attention.rope for layer in load_spec(written(tmp_path, **config)).layers]
    expected = transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters
    full, local = expected["full_attention"], expected["sliding_attention"]
    assert ropes[5] == RopeSpec(full["rope_theta"], 8, full["rope_type"], full["factor"])
    assert set(ropes[:5]) == {RopeSpec(local["rope_theta"], 8, local["rope_type"])}
