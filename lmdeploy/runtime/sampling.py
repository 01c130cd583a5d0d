"""From `GenerationConfig` and the defaults of model and caller to the engine's `SamplingParams`.

Owns the rules for silent fields, greedy, seeds and what may not be drawn. Knows token ids and the size of the
vocabulary; no text, no wire format.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from lmdeploy.config import (
    DEFAULT_MIN_P,
    DEFAULT_TEMPERATURE,
    DEFAULT_TOP_K,
    DEFAULT_TOP_P,
    GenerationConfig,
)
from lmdeploy.engine.request import SamplingParams
from lmdeploy.errors import ConfigError, RequestError
from lmdeploy.models.files import is_there

GREEDY_BELOW = 1e-5  # of temperature: dividing by less only amplifies rounding; of top_p: one token is left
BIAS_LIMIT = 100.0
_U64 = (1 << 64) - 1
_LAST_RESORT: dict[str, float] = {
    "temperature": DEFAULT_TEMPERATURE,
    "top_p": DEFAULT_TOP_P,
    "top_k": DEFAULT_TOP_K,
    "min_p": DEFAULT_MIN_P,
    "repetition_penalty": 1.0,
}
_GREEDY: dict[str, float] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


def resolve_sampling(
    config: GenerationConfig,
    defaults: Mapping[str, float],
    *,
    vocab_size: int,
    banned: Collection[int] = (),
    choice: int = 0,
) -> SamplingParams:
    """All-concrete sampling columns of one request.

    `defaults` fill the fields the caller left None; `banned` ids are never drawn; `choice` numbers the
    answers to one prompt, each with its own random stream. Raises RequestError naming the field.
    """
    values = {name: _value(config, defaults, name) for name in _LAST_RESORT}
    if not config.samples or values["temperature"] < GREEDY_BELOW or values["top_p"] < GREEDY_BELOW:
        values |= _GREEDY
    if config.logprobs is not None and config.logprobs > vocab_size:
        raise RequestError(
            f"logprobs={config.logprobs}: the vocabulary has {vocab_size} tokens", param="logprobs"
        )
    return SamplingParams(
        temperature=values["temperature"],
        top_k=max(0, int(values["top_k"])),
        top_p=values["top_p"],
        min_p=values["min_p"],
        repetition_penalty=values["repetition_penalty"],
        presence_penalty=config.presence_penalty,
        frequency_penalty=config.frequency_penalty,
        seed=stream_seed(config.random_seed, choice),
        logit_bias=_logit_bias(config.logit_bias or {}, banned, vocab_size),
        allowed_ids=_allowed(config, banned, vocab_size),
        logprobs=config.logprobs,
    )


def _allowed(config: GenerationConfig, banned: Iterable[int], vocab_size: int) -> tuple[int, ...] | None:
    if config.allowed_token_ids is None:
        return None
    check_ids(config.allowed_token_ids, vocab_size, "allowed_token_ids")
    bias = config.logit_bias or {}
    left = {i for i in config.allowed_token_ids if bias.get(i, 0.0) > -BIAS_LIMIT} - set(banned)
    if not left:
        raise RequestError(
            "allowed_token_ids leave no token to choose from, beside what is banned",
            param="allowed_token_ids",
        )
    return tuple(sorted(left))


def _value(config: GenerationConfig, defaults: Mapping[str, float], name: str) -> float:
    given = getattr(config, name)
    return float(given if given is not None else defaults.get(name, _LAST_RESORT[name]))


def stream_seed(seed: int | None, choice: int = 0) -> int:
    """Unsigned 64-bit seed of one choice; None draws one. Choice 0 uses the caller's seed itself.

    Negative seeds are taken modulo 2^64. Further choices pass through the finaliser of SplitMix64 (Steele,
    Lea, Flood 2014), so that neighbouring seeds do not share streams.
    """
    if seed is None:
        return secrets.randbits(64)
    x = seed & _U64
    if choice == 0:
        return x
    x = (x + choice * 0x9E3779B97F4A7C15) & _U64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _U64
    return x ^ (x >> 31)


def check_ids(ids: Iterable[int], vocab_size: int, param: str) -> None:
    """Raise RequestError for the first id outside the vocabulary."""
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{param}: token id {token_id} is not in the vocabulary (0 to {vocab_size - 1})", param=param
            )


def _logit_bias(
    bias: Mapping[int, float], banned: Iterable[int], vocab_size: int
) -> tuple[tuple[int, float], ...]:
    """(id, bias) in rising id order. Values are clipped to +-100; -100 is a ban (-inf), +100 stays a bias."""
    check_ids(bias, vocab_size, "logit_bias")
    out = {i: -math.inf if x <= -BIAS_LIMIT else min(float(x), BIAS_LIMIT) for i, x in bias.items()}
    out.update(dict.fromkeys(banned, -math.inf))
    if sum(x == -math.inf for x in out.values()) >= vocab_size:
        raise RequestError("logit_bias and banned words leave no token to choose from", param="logit_bias")
    return tuple(sorted(out.items()))


def model_defaults(model_path: Path, source: str = "auto") -> dict[str, float]:
    """Sampling fields that generation_config.json sets.

    `source`: "auto" looks beside the model, "lmdeploy" uses no file, anything else is a directory or a file.
    Raises ConfigError when a file that was asked for is missing, or has unusable values.
    """
    if source == "lmdeploy":
        return {}
    given = Path(source) if source != "auto" else model_path if model_path.is_dir() else model_path.parent
    file = given / "generation_config.json" if given.is_dir() else given
    if source == "auto" and not is_there(file):
        return {}
    values = _read_object(file)
    known = [*_LAST_RESORT, "do_sample"]
    fields = {name: values[name] for name in known if values.get(name) is not None}
    try:
        GenerationConfig(**fields)
    except RequestError as error:
        raise ConfigError(
            f"{file}: {error.message}; mend the file (a server ignores it with --generation-config lmdeploy)"
        ) from None
    fields.pop("do_sample", None)  # each interface has its own rule of when it samples
    return fields


def _read_object(file: Path) -> dict[str, Any]:
    if file.exists() and not file.is_file():
        raise ConfigError(f"{file} is not a regular file")
    try:
        values = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{file} cannot be read: {reason}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file} must hold a JSON object")
    return values
