"""What a description leaves out has the value that transformers gives it, for every field of every family."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from family_models import SIZES
from family_rows import ROWS

from lmdeploy.errors import ModelError
from lmdeploy.models.fields import Fields
from lmdeploy.models.registry import FAMILIES, load_spec
from lmdeploy.models.spec import ModelSpec

# Absent, these are refused: a configuration class only has the sizes of one model for them.
REQUIRED = {
    *("architectures", "vocab_size", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads"),
}
ROPE_REQUIRED = {"rope_type", "factor", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor"}
# llama3 without it is refused; the class takes the longest sequence for it and warns that this is no use. The
# lists of longrope have one number for each pair of the share that is turned.
KIND_REQUIRED = {"llama3": {"original_max_position_embeddings"}, "longrope": {"partial_rotary_factor"}}
# The number of key heads of every class divides these.
HEADS = {"hidden_size": 512, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 16}
NAMES = {name: row for name, row in ROWS.items() if row.rename is None}
Config = dict[str, Any]


def spec_of(path: Path, config: Config) -> ModelSpec:
    (path / "config.json").write_text(json.dumps(config))
    return load_spec(path)


def completed(model: str, given: Config) -> Config:
    """Everything that the configuration class makes of `given`."""
    stem = {"Gemma3": "Gemma3Text"}.get(model, model)
    options = {k: v for k, v in given.items() if k not in ("architectures", "model_type")}
    made = getattr(transformers, f"{stem}Config")(**copy.deepcopy(options))
    return {**json.loads(made.to_json_string(use_diff=False)), "architectures": [f"{model}ForCausalLM"]}


def shortened(whole: Config) -> Iterator[tuple[str, Config]]:
    """The description without one field, or without one field of its rotation; what is missing, first."""
    # Phi3Config lets its own 4096 win over what the rotation says when nothing stands beside it; we do not.
    for key in whole.keys() - REQUIRED - {"original_max_position_embeddings"}:
        yield key, {k: v for k, v in whole.items() if k != key}
    rope = whole["rope_parameters"]
    required = ROPE_REQUIRED | KIND_REQUIRED.get(rope.get("rope_type"), set())
    for key in () if "full_attention" in rope else rope.keys() - required:
        yield key, {**whole, "rope_parameters": {k: v for k, v in rope.items() if k != key}}


@pytest.mark.parametrize("name", NAMES)
def test_a_field_left_out_has_the_default_of_transformers(name: str, tmp_path: Path) -> None:
    row = NAMES[name]
    whole = completed(row.model, {**SIZES, **row.options, **HEADS})
    fields = 0
    for key, some in shortened(whole):
        assert spec_of(tmp_path, some) == spec_of(tmp_path, completed(row.model, some)), key
        fields += 1
    assert fields > 12


@pytest.mark.parametrize("key", sorted(REQUIRED - {"architectures"}))
def test_sizes_have_no_default(key: str, tmp_path: Path) -> None:
    for name in ("llama", "gemma2", "phi3"):
        config = completed(NAMES[name].model, {**SIZES, **NAMES[name].options})
        with pytest.raises(ModelError, match=f"{key} is missing"):
            spec_of(tmp_path, {k: v for k, v in config.items() if k != key})


def test_null_is_none_where_a_class_has_a_value(tmp_path: Path) -> None:
    """Mistral files without windows say null; the class means 4096 when nothing is said."""
    config = completed("Mistral", {**SIZES, "sliding_window": None})
    assert {x.attention.window for x in spec_of(tmp_path, config).layers} == {None}
    del config["sliding_window"]
    assert {x.attention.window for x in spec_of(tmp_path, config).layers} == {4096}
    config = completed("Gemma2", {**SIZES, "attn_logit_softcapping": None, "final_logit_softcapping": None})
    spec = spec_of(tmp_path, config)
    assert (spec.layers[0].attention.softcap, spec.logit_softcap) == (None, None)


def test_internlm2_has_biases_unless_it_says_otherwise(tmp_path: Path) -> None:
    """The public configuration_internlm2.py: bias=True. (Published models write false.)"""
    config = completed("Llama", SIZES)
    for key in ("attention_bias", "mlp_bias"):
        del config[key]
    config |= {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2"}
    for given, biased in (({}, True), ({"bias": False}, False)):
        attention = spec_of(tmp_path, {**config, **given}).layers[0].attention
        assert (attention.qkv_bias, attention.out_bias) == (biased, biased)


# Of training, of generation, of the form of the answer; and what is derived from a field that is read.
NO_EFFECT = {
    *("_name_or_path", "architectures", "dtype", "id2label", "label2id", "model_type", "problem_type"),
    *("transformers_version", "output_attentions", "output_hidden_states", "return_dict", "use_cache"),
    *("attention_dropout", "embd_pdrop", "resid_pdrop", "residual_dropout", "initializer_range"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "chunk_size_feed_forward", "pretraining_tp"),
    *("_sliding_window_pattern", "original_max_position_embeddings"),
}


class Seen(dict[str, Any]):
    """A description that remembers which of its fields were looked at."""

    def __init__(self, values: Config) -> None:
        super().__init__(values)
        self.seen: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)


@pytest.mark.parametrize("name", NAMES)
def test_no_field_of_a_class_goes_unread(name: str) -> None:
    """Each is read, refused unless it is neutral, or known to leave the logits alone."""
    row = NAMES[name]
    whole = completed(row.model, {**SIZES, **row.options, **HEADS})
    (family,) = (x for x in FAMILIES if whole["architectures"][0] in x.hf_architectures)
    config = Seen(whole)
    nested = "full_attention" in whole["rope_parameters"]
    config["rope_parameters"] = rope = Seen(whole["rope_parameters"])
    fields = Fields(config, "config.json")
    family.from_hf(fields)
    fields.refuse_unread()
    assert config.keys() - config.seen <= NO_EFFECT
    assert nested or rope.keys() - rope.seen <= NO_EFFECT
