"""What metadata of GGUF files means where a key is left out or written in an old way.

Reference: llama.cpp's own defaults (rope.scaling.type is "linear" when absent, the old key of its factor
`rope.scale_linear`; Gemma 2 caps scores at 50 and logits at 30), and transformers' frequencies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_models import SIZES, gguf_metadata, gguf_tensors, tiny, write_gguf
from family_rows import ROWS
from gguf import GGMLQuantizationType as Kind
from gguf_files import write_llama
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lmdeploy.errors import ModelError
from lmdeploy.models.registry import load_spec, open_checkpoint
from lmdeploy.models.rope import inverse_frequencies


def frequencies(**metadata: Any) -> np.ndarray[Any, Any]:
    """From transformers, for heads of 16 and theta 10000."""
    rope = {"rope_type": "linear", "rope_theta": 10000.0, **metadata}
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=rope)
    return ROPE_INIT_FUNCTIONS["linear"](config, torch.device("cpu"))[0].double().numpy()


@pytest.mark.parametrize(
    ("metadata", "factor"),
    [
        ({"rope__scaling__factor": 4.0}, 4.0),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, 4.0),
        ({"rope__scale_linear": 4.0}, 4.0),
        ({"rope__scaling__factor": 2.0, "rope__scale_linear": 4.0}, 2.0),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, 1.0),
        ({"rope__scaling__type": "none"}, 1.0),
        ({"rope__scaling__factor": 0.0}, 1.0),
        ({"rope__scaling__type": "linear"}, 1.0),
    ],
)
def test_a_factor_without_a_type_is_linear(metadata: dict[str, Any], factor: float, tmp_path: Path) -> None:
    rope = load_spec(write_llama(tmp_path / "m.gguf", Kind.F32, **metadata)).layers[0].attention.rope
    assert rope is not None
    assert np.allclose(inverse_frequencies(rope), frequencies(factor=factor), rtol=1e-6)


@pytest.mark.parametrize(
    ("metadata", "extra", "words"),
    [
        ({"rope__scaling__type": "longrope"}, (), r"is 'longrope', which is not supported"),
        ({}, ("rope_factors_long.weight",), "'rope_factors_long.weight' has no place in a llama model"),
        ({"rope__scaling__factor": 4.0}, ("rope_freqs.weight",), "holds rope_freqs.weight beside"),
        ({"rope__scaling__yarn_ext_factor": 0.5}, (), "yarn_ext_factor is 0.5, which changes"),
        ({"attention__head_count_kv": [2, 1]}, (), r"head_count_kv is \[2, 1\]; layers that differ"),
        ({"attention__head_count_kv": [2, 2, 2]}, (), r"head_count_kv is \[2, 2, 2\]; a whole number"),
    ],
)
def test_what_would_go_unread_is_refused(
    metadata: dict[str, Any], extra: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    tensors = {name: np.ones(8, np.float32) for name in extra}
    with pytest.raises(ModelError, match=words):
        open_checkpoint(write_llama(tmp_path / "m.gguf", Kind.F32, extra=tensors, **metadata))


def test_a_list_of_equal_numbers_is_that_number(tmp_path: Path) -> None:
    lists = {"attention__head_count": [4, 4], "attention__head_count_kv": [2, 2]}
    lists["feed_forward_length"] = [96, 96]
    plain = load_spec(write_llama(tmp_path / "plain.gguf"))
    assert open_checkpoint(write_llama(tmp_path / "m.gguf", **lists)).spec == plain


def test_gemma_2_caps_when_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("Gemma2", **ROWS["gemma2, usual scale"].options)
    without = {k: v for k, v in gguf_metadata(model, "gemma2").items() if "softcapping" not in k}
    monkeypatch.setattr("family_models.gguf_metadata", lambda model, arch: without)
    spec = load_spec(write_gguf(tmp_path / "m.gguf", model, "gemma2"))
    assert {layer.attention.softcap for layer in spec.layers} == {50.0}
    assert (spec.logit_softcap, len(spec.layers)) == (30.0, SIZES["num_hidden_layers"])


def test_longrope_needs_both_lists(tmp_path: Path) -> None:
    model = tiny("Phi3", **ROWS["phi3, longrope"].options)
    tensors = {k: v for k, v in gguf_tensors(model, "phi3").items() if k != "rope_factors_short.weight"}
    with pytest.raises(ModelError, match=r"'rope_factors_short\.weight' is missing, which longrope needs"):
        load_spec(write_gguf(tmp_path / "m.gguf", model, "phi3", tensors))
