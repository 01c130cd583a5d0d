"""Which sampling parameters a request gets."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lmdeploy.config import GenerationConfig
from lmdeploy.engine.request import SamplingParams
from lmdeploy.errors import ConfigError, ModelError, RequestError
from lmdeploy.runtime.sampling import model_defaults, resolve_sampling, stream_seed


def resolve(defaults: dict[str, float] | None = None, choice: int = 0, **fields: Any) -> SamplingParams:
    return resolve_sampling(GenerationConfig(**fields), defaults or {}, vocab_size=1000, choice=choice)


def chosen(params: SamplingParams) -> tuple[float, int, float, float]:
    return params.temperature, params.top_k, params.top_p, params.min_p


GREEDY = (0.0, 0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, GREEDY),
        ({"do_sample": False, "temperature": 1.0, "top_k": 5}, GREEDY),
        ({"temperature": 0.0, "top_p": 0.5}, GREEDY),
        ({"temperature": 1e-7}, GREEDY),
        ({"top_p": 0.0}, GREEDY),
        ({"do_sample": True, "top_p": 0}, GREEDY),
        ({"do_sample": True}, (0.8, 50, 1.0, 0.0)),
        ({"temperature": 1.0}, (1.0, 50, 1.0, 0.0)),
        ({"temperature": 2}, (2.0, 50, 1.0, 0.0)),
        ({"top_k": 0}, (0.8, 0, 1.0, 0.0)),
        ({"top_p": 0.9, "min_p": 0.1}, (0.8, 50, 0.9, 0.1)),
    ],
)
def test_greedy_or_sampled(fields: dict[str, Any], expected: tuple[float, ...]) -> None:
    assert chosen(resolve(**fields)) == expected


@pytest.mark.parametrize(("value", "ok"), [(-0.1, False), (2.1, False), ("hot", False), (0, True), (2, True)])
def test_temperature_edges(value: Any, ok: bool) -> None:
    if ok:
        resolve(temperature=value)
        return
    with pytest.raises(RequestError) as caught:
        resolve(temperature=value)
    assert caught.value.param == "temperature"


class TestModelDefaults:
    """The file speaks where the caller is silent, and only there."""

    file: ClassVar = {"temperature": 0.6, "top_k": 20.0, "repetition_penalty": 1.1}

    def test_silent_caller(self) -> None:
        params = resolve(self.file, do_sample=True)
        assert (*chosen(params), params.repetition_penalty) == (0.6, 20, 1.0, 0.0, 1.1)

    def test_explicit_values_win(self) -> None:
        params = resolve(self.file, temperature=1.0, top_k=0, repetition_penalty=1.0)
        assert (*chosen(params), params.repetition_penalty) == (1.0, 0, 1.0, 0.0, 1.0)

    def test_zero_is_explicit(self) -> None:
        assert chosen(resolve(self.file, temperature=0)) == GREEDY

    def test_file_alone_does_not_switch_sampling_on(self) -> None:
        assert chosen(resolve(self.file)) == GREEDY

    def test_read_from_the_model(self, tmp_path: Path) -> None:
        values = {"temperature": 0.6, "top_k": 20, "do_sample": True, "eos_token_id": [1, 2], "top_p": None}
        (tmp_path / "generation_config.json").write_text(json.dumps(values))
        assert model_defaults(tmp_path) == {"temperature": 0.6, "top_k": 20}
        assert model_defaults(tmp_path / "model.gguf") == {"temperature": 0.6, "top_k": 20}
        assert model_defaults(tmp_path / "other", str(tmp_path)) == {"temperature": 0.6, "top_k": 20}
        assert model_defaults(tmp_path, "lmdeploy") == {}

    def test_model_without_a_file(self, tmp_path: Path) -> None:
        assert model_defaults(tmp_path) == {}
        with pytest.raises(ConfigError, match="generation_config"):
            model_defaults(tmp_path, str(tmp_path))

    def test_what_is_no_file_is_not_taken_as_absent(self, tmp_path: Path) -> None:
        (tmp_path / "generation_config.json").symlink_to("nowhere")
        with pytest.raises(ModelError, match="a link to nothing"):
            model_defaults(tmp_path)
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(ConfigError, match="not a regular file"):
            model_defaults(tmp_path, str(tmp_path / "pipe"))

    @pytest.mark.parametrize(
        "text", ['{"do_sample": "yes"}', '{"temperature": "hot"}', '{"top_p": 7}', "[]", "{"]
    )
    def test_unusable_file_is_named(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(ConfigError, match="generation_config"):
            model_defaults(tmp_path)


def test_penalties_hold_for_greedy_too() -> None:
    params = resolve(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=-0.5)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.2, 0.5, -0.5)


class TestSeeds:
    def test_given_seed_is_used(self) -> None:
        assert resolve(random_seed=42).seed == 42

    def test_negative_seed_is_taken_modulo_two_to_the_64(self) -> None:
        assert resolve(random_seed=-1).seed == 2**64 - 1
        assert resolve(random_seed=-(2**63)).seed == 2**63

    def test_no_seed_differs_each_time(self) -> None:
        assert len({resolve().seed for _ in range(8)}) == 8

    def test_choices_have_streams_of_their_own(self) -> None:
        seeds = {stream_seed(seed, choice) for seed in range(50) for choice in range(50)}
        assert len(seeds) == 2500
        assert all(0 <= seed < 2**64 for seed in seeds)
        assert stream_seed(7, 3) == stream_seed(7, 3)


class TestLogitBias:
    def test_clipped_and_minus_hundred_bans(self) -> None:
        bias = {5: 250.0, 3: -100, 4: -99.5, 9: -math.inf, 1: 100}
        expected = ((1, 100.0), (3, -math.inf), (4, -99.5), (5, 100.0), (9, -math.inf))
        assert resolve(logit_bias=bias).logit_bias == expected

    @pytest.mark.parametrize("token", [1000, 99999999])
    def test_id_outside_the_vocabulary(self, token: int) -> None:
        with pytest.raises(RequestError, match=str(token)) as caught:
            resolve(logit_bias={token: 1.0})
        assert caught.value.param == "logit_bias"

    def test_a_ban_on_everything_is_refused(self) -> None:
        with pytest.raises(RequestError):
            resolve(logit_bias=dict.fromkeys(range(1000), -100.0))


def test_logprobs_limit() -> None:
    assert resolve(logprobs=0).logprobs == 0
    assert resolve(logprobs=1000).logprobs == 1000
    with pytest.raises(RequestError, match="has 1000 tokens") as caught:
        resolve(logprobs=1001)
    assert caught.value.param == "logprobs"
