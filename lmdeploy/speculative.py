"""The options of speculative decoding as users know them: a method and its settings, as class or dictionary.

The spellings are those of other servers: the keys of a `speculative_config` dictionary, and the fields of
LMDeploy's `SpeculativeConfig`. Knows no model and no machine.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmdeploy.errors import ConfigError
from lmdeploy.field_checks import check_fields

METHODS = ("ngram", "draft_model")
DEFAULT_MOST, DEFAULT_LOOKUP_MAX, DEFAULT_LOOKUP_MIN = 8, 5, 2


def _field(default: Any, help: str, **rules: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, **rules})


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Speculative decoding: several tokens a step where the next ones can be guessed, the same answer always.

    Raises ConfigError, naming field, value and reason.
    """

    method: str | None = _field(
        None,
        "where guesses come from: ngram (what followed the same tokens before, in prompt or answer) or "
        "draft_model (a smaller model, given as `model`)",
        choices=METHODS,
    )
    model: str = _field(
        "",
        "draft_model: directory, GGUF file or hub id of a model with the same vocabulary",
        kind=str,
        path=True,
    )
    num_speculative_tokens: int | None = _field(
        None,
        f"most guesses of a sequence in a step, fewer where more do not pay; default {DEFAULT_MOST}",
        kind=int,
        low=1,
        high=64,
    )
    prompt_lookup_max: int | None = _field(
        None,
        f"ngram: most tokens compared to find the place to go on from; default {DEFAULT_LOOKUP_MAX}",
        kind=int,
        low=1,
        high=64,
    )
    prompt_lookup_min: int | None = _field(
        None,
        f"ngram: fewest tokens that must be the same; default {DEFAULT_LOOKUP_MIN}",
        kind=int,
        low=1,
        high=64,
    )

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if self.method is None:
            if not self.model:
                raise _wrong("needs a method: " + " or ".join(METHODS), "method")
            object.__setattr__(self, "method", "draft_model")
        if (self.method == "draft_model") != bool(self.model):
            what = "needs" if self.method == "draft_model" else "takes no"
            raise _wrong(f"with the method {self.method} {what} model", "model")
        if self.method != "ngram" and (self.prompt_lookup_max or self.prompt_lookup_min):
            raise _wrong(
                "has keys of the method ngram: prompt_lookup_max, prompt_lookup_min", "prompt_lookup_max"
            )
        if self.lookup_min > self.lookup_max:
            raise _wrong(
                f"has a prompt_lookup_min={self.lookup_min} larger than prompt_lookup_max={self.lookup_max}",
                "prompt_lookup_min",
            )

    @property
    def most(self) -> int:
        """Guesses of a sequence in a step, at most."""
        return self.num_speculative_tokens or DEFAULT_MOST

    @property
    def lookup_max(self) -> int:
        return self.prompt_lookup_max or max(DEFAULT_LOOKUP_MAX, self.prompt_lookup_min or 0)

    @property
    def lookup_min(self) -> int:
        return self.prompt_lookup_min or min(DEFAULT_LOOKUP_MIN, self.lookup_max)

    def line(self) -> str:
        """For the account at start."""
        source = self.model or f"prompt lookup by {self.lookup_min} to {self.lookup_max} tokens"
        return f"up to {self.most} tokens ahead, from {source}"


def speculative_options(
    value: SpeculativeConfig | Mapping[str, Any] | str | None,
) -> SpeculativeConfig | None:
    """The configuration that a class, a dictionary or its JSON text stands for. Raises ConfigError."""
    if value is None or isinstance(value, SpeculativeConfig):
        return value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            example = f'{{"method": "{METHODS[0]}"}}'
            raise _wrong(
                f"is not JSON: {error}; methods are {', '.join(METHODS)}, such as {example}",
                "speculative_config",
            ) from None
    if not isinstance(value, Mapping):
        raise _wrong(f"must be a dictionary, not {type(value).__name__}", "speculative_config")
    names = {field.name for field in dataclasses.fields(SpeculativeConfig)}
    if unknown := sorted(str(key) for key in value if key not in names):
        raise _wrong(
            f"has unknown keys: {', '.join(unknown)}; known are {', '.join(sorted(names))}", unknown[0]
        )
    return SpeculativeConfig(**value)


def _wrong(what: str, param: str) -> ConfigError:
    return ConfigError(f"speculative_config {what}", param=param)
