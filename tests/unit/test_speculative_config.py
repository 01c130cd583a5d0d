"""The options of speculative decoding: spellings, what is refused and in which words."""

from __future__ import annotations

from typing import Any

import pytest

import lmdeploy
from lmdeploy import SpeculativeConfig
from lmdeploy.errors import ConfigError
from lmdeploy.speculative import speculative_options


def test_the_dictionary_of_other_servers() -> None:
    given = {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 3,
    }
    config = speculative_options(given)
    assert config == SpeculativeConfig("ngram", "", 5, 4, 3)
    assert (config.most, config.lookup_max, config.lookup_min) == (5, 4, 3)
    assert speculative_options('{"model": "small"}') == SpeculativeConfig("draft_model", "small")
    assert speculative_options(config) is config
    assert speculative_options(None) is None


def test_one_bound_of_the_lookup_moves_the_other() -> None:
    assert SpeculativeConfig("ngram", prompt_lookup_max=1).lookup_min == 1
    assert SpeculativeConfig("ngram", prompt_lookup_min=9).lookup_max == 9
    assert SpeculativeConfig("ngram").line() == "up to 8 tokens ahead, from prompt lookup by 2 to 5 tokens"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"method": "eagle3"}, "method='eagle3': must be one of ngram, draft_model"),
        ({"num_speculative_tokens": 3}, "needs a method: ngram or draft_model"),
        ({"method": "draft_model"}, "with the method draft_model needs model"),
        ({"method": "ngram", "model": "x"}, "with the method ngram takes no model"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens=0: must be at least 1"),
        ({"model": "x", "prompt_lookup_max": 3}, "keys of the method ngram"),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3}, "larger than"),
        ({"method": "ngram", "draft_tensor_parallel_size": 1}, "unknown keys: draft_tensor_parallel_size"),
        ("{", "is not JSON"),
        ("ngram", "methods are ngram, draft_model"),
        ("[1]", "must be a dictionary, not list"),
    ],
)
def test_what_is_refused(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        speculative_options(given)


def test_the_pipeline_refuses_before_it_looks_for_the_model() -> None:
    with pytest.raises(ConfigError, match="unknown keys: methd"):
        lmdeploy.pipeline("no-such-model", speculative_config={"methd": "ngram"})
