"""Descriptions with any value anywhere: a ModelError of one line or a sound spec, nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf_files import write_llama
from hf_files import CONFIG
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from text_models import tiny_metadata, write_sentencepiece_directory

from lmdeploy.errors import ModelError
from lmdeploy.models.gguf import GGUFFile
from lmdeploy.models.registry import FAMILIES, load_spec
from lmdeploy.models.spec import ModelSpec
from lmdeploy.text.chat_template import load_chat_template
from lmdeploy.text.gguf_vocabulary import backend_from_gguf
from lmdeploy.text.tokenizer import load_tokenizer

QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}
SCALARS = st.none() | st.booleans() | st.integers(-3, 1 << 65) | st.floats() | st.text(max_size=5)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=3), SCALARS, max_size=2)
ROPE = st.dictionaries(
    st.sampled_from(["rope_type", "type", "factor", "low_freq_factor", "high_freq_factor", "rope_theta"]),
    VALUES | st.sampled_from(["linear", "llama3", "default"]),
)


def attempt(action: Any, *arguments: Any) -> Any:
    """The result, or None after a ModelError of one line."""
    try:
        return action(*arguments)
    except ModelError as error:
        message = str(error)
    assert "\n" not in message
    return None


@settings(max_examples=300, **QUIET)
@given(data=st.data())
def test_any_configuration(data: st.DataObject, tmp_path: Path) -> None:
    keys = [*CONFIG, "rope_scaling", "rope_parameters", "hidden_act", "attention_bias", "sliding_window"]
    changes = data.draw(st.dictionaries(st.sampled_from(keys), VALUES | ROPE, max_size=3))
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    spec = attempt(load_spec, tmp_path)
    assert spec is None or (isinstance(spec, ModelSpec) and len(list(spec.tensors())) > 3)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    return GGUFFile(write_llama(tmp_path_factory.mktemp("fuzz") / "m.gguf"))


@settings(max_examples=300, **QUIET)
@given(data=st.data())
def test_any_gguf_metadata(data: st.DataObject, file: GGUFFile) -> None:
    keys = [key for key in file.metadata if key.startswith("llama.")]
    keys += ["llama.expert_count", "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.vocab_size"]
    changes = data.draw(st.dictionaries(st.sampled_from(keys), VALUES, max_size=3))
    whole, file.metadata = file.metadata, {**file.metadata, **changes}
    try:
        spec = attempt(FAMILIES[0].from_gguf, file)
    finally:
        file.metadata = whole
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
