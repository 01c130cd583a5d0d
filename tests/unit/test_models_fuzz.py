"""Descriptions with any value anywhere: a ModelError of one line or a sound spec, nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import write_llama
from hf_files import CONFIG
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from text_models import tiny_metadata, write_sentencepiece_directory

from lmdeploy.errors import ModelError
from lmdeploy.models.families.base import Family
from lmdeploy.models.fields import Fields
from lmdeploy.models.gguf import GGUFFile
from lmdeploy.models.registry import FAMILIES, load_spec
from lmdeploy.models.rope import SUPPORTED, inverse_frequencies
from lmdeploy.models.spec import ModelSpec
from lmdeploy.text.chat_template import load_chat_template
from lmdeploy.text.gguf_vocabulary import backend_from_gguf
from lmdeploy.text.tokenizer import load_tokenizer

QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}
SCALARS = st.none() | st.booleans() | st.integers(-3, 1 << 65) | st.floats() | st.text(max_size=5)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=3), SCALARS, max_size=2)
ROPE_KEYS = [
    "rope_type", "type", "factor", "low_freq_factor", "high_freq_factor", "rope_theta", "beta_fast", "mscale",
    "original_max_position_embeddings", "short_factor", "long_factor", "attention_factor", "truncate",
]  # fmt: skip
ROPE = st.dictionaries(st.sampled_from(ROPE_KEYS), VALUES | st.sampled_from(SUPPORTED))
FLAGS = [
    "rope_scaling", "rope_parameters", "hidden_act", "attention_bias", "sliding_window", "layer_types",
    "use_sliding_window", "max_window_layers", "partial_rotary_factor", "query_pre_attn_scalar",
    "no_rope_layers", "sliding_window_pattern", "final_logit_softcapping", "max_position_embeddings",
]  # fmt: skip
GGUF_FLAGS = [
    "expert_count", "rope.scaling.type", "rope.scaling.factor", "vocab_size", "attention.sliding_window",
    "attention.sliding_window_pattern", "rope.dimension_count", "attn_logit_softcapping",
]  # fmt: skip


def attempt(action: Any, *arguments: Any) -> Any:
    """The result, or None after a ModelError of one line."""
    try:
        return action(*arguments)
    except ModelError as error:
        message = str(error)
    assert "\n" not in message
    return None


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@settings(max_examples=60, **QUIET)
@given(data=st.data())
def test_any_configuration(family: Family, data: st.DataObject, tmp_path: Path) -> None:
    changes = data.draw(st.dictionaries(st.sampled_from([*CONFIG, *FLAGS]), VALUES | ROPE, max_size=3))
    changes["architectures"] = [family.hf_architectures[0]]
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    spec = attempt(load_spec, tmp_path)
    assert spec is None or (isinstance(spec, ModelSpec) and len(list(spec.tensors())) > 3)
    for layer in spec.layers if spec else ():
        rope = layer.attention.rope
        assert rope is None or np.isfinite(inverse_frequencies(rope)).all()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    return GGUFFile(write_llama(tmp_path_factory.mktemp("fuzz") / "m.gguf"))


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.from_gguf], ids=lambda family: family.name)
@settings(max_examples=60, **QUIET)
@given(data=st.data())
def test_any_gguf_metadata(family: Family, data: st.DataObject, file: GGUFFile) -> None:
    keys = [key.removeprefix("llama.") for key in file.metadata if key.startswith("llama.")] + GGUF_FLAGS
    changes = data.draw(st.dictionaries(st.sampled_from(keys), VALUES, max_size=3))
    given_keys = {key.removeprefix("llama."): value for key, value in file.metadata.items()}
    fields = Fields({**given_keys, **changes}, str(file.path))
    assert family.from_gguf is not None
    spec = attempt(family.from_gguf, fields, file)
    assert spec is None or isinstance(spec, ModelSpec)


@settings(max_examples=200, **QUIET)
@given(data=st.data())
def test_any_gguf_vocabulary(data: st.DataObject) -> None:
    keys = ["model", "pre", "tokens", "merges", "token_type", "bos_token_id", "add_bos_token", "eos_token_id"]
    changes = data.draw(st.dictionaries(st.sampled_from(keys), VALUES, max_size=2))
    attempt(backend_from_gguf, tiny_metadata(**changes), "x.gguf")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sentencepiece_directory(tmp_path_factory.mktemp("fuzz") / "sp")


@settings(max_examples=200, **QUIET)
@given(data=st.data())
def test_any_tokenizer_files(data: st.DataObject, directory: Path) -> None:
    keys = ["bos_token", "eos_token", "unk_token", "added_tokens_decoder", "chat_template"]
    config = data.draw(st.dictionaries(st.sampled_from(keys), VALUES | st.dictionaries(st.text(), VALUES)))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": data.draw(VALUES)}))
    tokenizer = attempt(load_tokenizer, directory)
    if tokenizer is not None:
        attempt(load_chat_template, directory, tokenizer)
        assert all(0 <= i < tokenizer.vocab_size for i in tokenizer.eos_ids)
