"""The public configs: what they accept, what they refuse and in which words."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lmdeploy
from lmdeploy import ChatTemplateConfig, GenerationConfig, PytorchEngineConfig, TurbomindEngineConfig
from lmdeploy.config import EngineConfig, is_fixed
from lmdeploy.errors import ConfigError, RequestError

# What users of the original project know (its documented defaults), where this project keeps them.
KNOWN_ENGINE_DEFAULTS = {
    "dtype": "auto",
    "model_format": None,
    "tp": 1,
    "session_len": None,
    "max_batch_size": None,
    "cache_max_entry_count": 0.8,
    "cache_block_seq_len": 64,
    "quant_policy": 0,
    "rope_scaling_factor": 0.0,
    "use_logn_attn": False,
    "download_dir": None,
    "revision": None,
}
KNOWN_GENERATION_DEFAULTS = {
    "n": 1,
    "max_new_tokens": 512,
    "ignore_eos": False,
    "random_seed": None,
    "stop_words": None,
    "bad_words": None,
    "min_new_tokens": None,
    "skip_special_tokens": True,
    "logprobs": None,
}
CLASSES = (TurbomindEngineConfig, PytorchEngineConfig, GenerationConfig, ChatTemplateConfig)
FIXED = [(cls, f) for cls in CLASSES for f in dataclasses.fields(cls) if is_fixed(f)]


def test_known_defaults() -> None:
    engine, generation = TurbomindEngineConfig(), GenerationConfig()
    assert {k: getattr(engine, k) for k in KNOWN_ENGINE_DEFAULTS} == KNOWN_ENGINE_DEFAULTS
    assert {k: getattr(generation, k) for k in KNOWN_GENERATION_DEFAULTS} == KNOWN_GENERATION_DEFAULTS
    assert engine.enable_prefix_caching is True
    assert generation.do_sample is None


# Documented defaults of the original PyTorch engine, for the fields that only it has.
KNOWN_PYTORCH_DEFAULTS = {
    "block_size": 64,
    "num_cpu_blocks": 0,
    "num_gpu_blocks": 0,
    "adapters": None,
    "prefill_interval": 16,
    "thread_safe": False,
    "eager_mode": False,
    "custom_module_map": None,
    "distributed_executor_backend": None,
    "enable_mp_engine": False,
    "logprobs_mode": None,
    "dllm_unmasking_strategy": "low_confidence_dynamic",
    "dllm_confidence_threshold": 0.85,
    "role": "Hybrid",
    "migration_backend": "DLSlime",
}


def test_known_defaults_of_the_pytorch_engine() -> None:
    config = PytorchEngineConfig()
    assert {k: getattr(config, k) for k in KNOWN_PYTORCH_DEFAULTS} == KNOWN_PYTORCH_DEFAULTS


def test_engines_share_their_fields() -> None:
    """One spelling: what both engines have is declared once, what one has the other does not repeat."""
    shared = {f.name for f in dataclasses.fields(EngineConfig)}
    native, torch = ({f.name for f in dataclasses.fields(c)} for c in CLASSES[:2])
    assert native & torch == shared
    assert {"session_len", "cache_block_seq_len", "max_prefill_token_num"} <= shared


@pytest.mark.parametrize(
    "wrong",
    [{"device_type": "ascend"}, {"dtype": "float8"}, {"block_size": 32}, {"eager_mode": 1}, {"tp": 2}],
)
def test_pytorch_config_refuses(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError, match=name) as caught:
        PytorchEngineConfig(**wrong)
    assert repr(value) in caught.value.message


@pytest.mark.parametrize("cls", CLASSES)
def test_every_field_has_help_and_a_default_that_passes(cls: type[Any]) -> None:
    assert all(f.metadata["help"] for f in dataclasses.fields(cls))
    cls()


@pytest.mark.parametrize(("cls", "field"), FIXED, ids=[f.name for _, f in FIXED])
def test_fixed_field_accepts_its_neutral_values_and_names_what_it_refuses(cls: type[Any], field: Any) -> None:
    for value in field.metadata["neutral"]:
        cls(**{field.name: value})
    with pytest.raises((ConfigError, RequestError)) as caught:
        cls(**{field.name: "something else"})
    message = caught.value.message
    assert field.name in message
    assert "something else" in message
    assert field.metadata["reason"] in message
    assert caught.value.param == field.name


@pytest.mark.parametrize(
    "wrong",
    [
        {"session_len": 0},
        {"session_len": 1.5},
        {"session_len": True},
        {"max_batch_size": 0},
        {"cache_max_entry_count": 0},
        {"cache_max_entry_count": 1},
        {"cache_max_entry_count": "0.5"},
        {"cache_block_seq_len": 60},
        {"cache_block_seq_len": None},
        {"enable_prefix_caching": 1},
        {"num_threads": 0},
        {"dtype": "float32"},
        {"model_format": "exl2"},
        {"quant_policy": 5},
        {"quant_policy": "8"},
        {"tp": 2},
        {"tp": True},
        {"revision": 3},
        {"revision": "\udcff"},
    ],
)
def test_engine_config_refuses(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError, match=name) as caught:
        TurbomindEngineConfig(**wrong)
    assert repr(value) in caught.value.message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0},
        {"temperature": -0.1},
        {"temperature": 2.1},
        {"temperature": "hot"},
        {"temperature": math.nan},
        {"temperature": True},
        {"top_p": 1.1},
        {"top_k": -1},
        {"top_k": 1.5},
        {"min_p": math.inf},
        {"repetition_penalty": 0},
        {"presence_penalty": 2.5},
        {"frequency_penalty": -2.5},
        {"random_seed": 2**64},
        {"logprobs": -1},
        {"stop_words": "word"},
        {"stop_words": [""]},
        {"bad_words": [3]},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": 5},
        {"bad_token_ids": [1.5]},
        {"logit_bias": {"5": 1.0}},
        {"logit_bias": {5: math.nan}},
        {"logit_bias": {5: math.inf}},
        {"ignore_eos": "no"},
        {"n": 2},
        {"output_logits": "all"},
        {"response_format": "json_object"},
        {"min_new_tokens": 600},
        {"temperature": 10**400},
        {"temperature": 10**5000},
        {"min_new_tokens": 10**5000},
        {"top_k": 10**12},
        {"stop_token_ids": [10**5000]},
        {"stop_words": ["ok", "\ud800"]},
        {"bad_words": ["\udcff"]},
    ],
)
def test_generation_config_refuses(wrong: dict[str, Any]) -> None:
    ((name, _),) = wrong.items()
    with pytest.raises(RequestError, match=name) as caught:
        GenerationConfig(**wrong)
    assert caught.value.param == name
    assert caught.value.status == 400


def test_numbers_of_numpy_are_numbers() -> None:
    config = GenerationConfig(
        temperature=np.float32(0.5),
        top_k=np.int64(5),
        random_seed=np.int64(-3),
        stop_token_ids=np.array([1, 2]),
        logit_bias={np.int32(7): np.float16(2), 8: 10**400, 9: -(10**400)},
    )
    assert (config.temperature, config.top_k, config.random_seed) == (0.5, 5, -3)
    assert type(config.top_k) is type(config.random_seed) is int
    assert config.stop_token_ids == [1, 2]
    assert config.logit_bias == {7: 2.0, 8: sys.float_info.max, 9: -sys.float_info.max}
    assert TurbomindEngineConfig(cache_block_seq_len=np.int64(32)).cache_block_seq_len == 32


def test_a_list_may_be_given_by_anything_that_can_be_walked_once() -> None:
    config = GenerationConfig(stop_words=(w for w in ["a", "b"]), bad_token_ids=iter([1]))
    assert (config.stop_words, config.bad_token_ids) == (["a", "b"], [1])


def test_generation_config_accepts_the_edges() -> None:
    GenerationConfig(temperature=0, top_p=0, top_k=0, min_p=1, random_seed=-(2**63), logprobs=0)
    GenerationConfig(temperature=2, top_p=1, random_seed=2**64 - 1, max_new_tokens=None, min_new_tokens=9999)
    GenerationConfig(stop_words=["a whole sentence. "], logit_bias={7: -math.inf}, stop_token_ids=(1, 2))
    assert GenerationConfig(response_format={"type": "text"}).response_format == {"type": "text"}


@pytest.mark.parametrize(
    ("given", "samples"),
    [
        ({}, False),
        ({"temperature": 0.7}, True),
        ({"top_p": 0.9}, True),
        ({"top_k": 5}, True),
        ({"min_p": 0.1}, True),
        ({"random_seed": 3, "repetition_penalty": 1.2}, False),
        ({"do_sample": False, "temperature": 0.7}, False),
        ({"do_sample": True}, True),
    ],
)
def test_sampling_begins_when_the_caller_asks_for_it(given: dict[str, Any], samples: bool) -> None:
    assert GenerationConfig(**given).samples is samples


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(RequestError) as caught:
        GenerationConfig(stop_words="x" * 100_000)
    assert len(caught.value.message) < 400


def test_configs_cannot_be_changed_later() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TurbomindEngineConfig().session_len = 5  # type: ignore[misc]


def test_chat_template_goes_through_json(tmp_path: Path) -> None:
    config = ChatTemplateConfig(model_name="own", system="<s>", user="«u»", eoh="\n", stop_words=["</s>"])
    path = tmp_path / "template.json"
    text = config.to_json(path)
    assert json.loads(text) == {
        "model_name": "own",
        "system": "<s>",
        "user": "«u»",
        "eoh": "\n",
        "stop_words": ["</s>"],
    }
    assert ChatTemplateConfig.from_json(path) == config
    assert ChatTemplateConfig.from_json(text) == config
    assert [p.name for p in tmp_path.iterdir()] == ["template.json"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"user": ', "is not JSON"),
        ('{"usr": "x"}', "unknown fields: usr"),
        ('{"user": 3}', "user=3"),
        ('{"user": "\\ud800"}', "lone surrogate"),
        ('{"capability": "completion"}', "do_preprocess=False"),
        ('{"model_path": "other"}', "template file"),
        ("no-such-file.json", "cannot be read"),
    ],
)
def test_chat_template_refuses(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ChatTemplateConfig.from_json(text)


def test_chat_template_file_that_holds_a_list(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text("[1]")
    with pytest.raises(ConfigError, match="must be a JSON object"):
        ChatTemplateConfig.from_json(path)


@pytest.mark.parametrize("name", ["VisionConfig", "Tokenizer", "client"])
def test_names_of_other_versions_say_what_stands_in_their_place(name: str) -> None:
    with pytest.raises(ImportError, match=f"{name} is not available: "):
        getattr(lmdeploy, name)
    assert name not in dir(lmdeploy)
