"""The options of speculative decoding as users know them: a method, and a dictionary or class of its settings.

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


def _field(default: Any, help: str, **rules: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, **rules})


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Speculative decoding: several tokens a step where the next ones can be guessed, the same answer always.

    Raises ConfigError, naming field, value and reason.
    """

    method: str | None = _field(
        None,
        "where guesses come from: ngram (what followed the same tokens in the prompt or the answer before) or "
        "draft_model (a smaller model, given as `model`)",
        choices=METHODS,
    )
    model: str = _field(
        "", "draft_model: directory, GGUF file or hub id of a model with the same vocabulary", kind=str, path=True
    )
    num_speculative_tokens: int | None = _field(
        None, "most guesses of a sequence in a step; fewer are taken where more do not pay", kind=int, low=1, high=64
    )
    prompt_lookup_max: int | None = _field(
        None, "ngram: most tokens compared to find the place to go on from", kind=int, low=1, high=64
    )
    prompt_lookup_min: int | None = _field(
        None, "ngram: fewest tokens that must be the same", kind=int, low=1, high=64
    )

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if self.method is None:
            if not self.model:
                raise _wrong("needs a method: " + " or ".join(METHODS), "method")
            object.__setattr__(self, "method", "draft_model")
        if self.method == "draft_model" and not self.model:
            raise _wrong("the method draft_model needs a model", "model")
        if self.method == "ngram":
            self._fill_lookup()
        elif self.prompt_lookup_max is not None or self.prompt_lookup_min is not None:
            raise _wrong("prompt_lookup_max and prompt_lookup_min belong to the method ngram", "prompt_lookup_max")
        if self.num_speculative_tokens is None:
            object.__setattr__(self, "num_speculative_tokens", 8 if self.method == "ngram" else 4)

    def _fill_lookup(self) -> None:
        if self.model:
            raise _wrong("the method ngram takes no model", "model")
        longest = self.prompt_lookup_max or max(5, self.prompt_lookup_min or 0)
        shortest = self.prompt_lookup_min or min(2, longest)
        if shortest > longest:
            raise _wrong(
                f"prompt_lookup_min={shortest} is larger than prompt_lookup_max={longest}", "prompt_lookup_min"
            )
        object.__setattr__(self, "prompt_lookup_max", longest)
        object.__setattr__(self, "prompt_lookup_min", shortest)


def speculative_config(value: SpeculativeConfig | Mapping[str, Any] | str | None) -> SpeculativeConfig | None:
    """The configuration that a class, a dictionary or its JSON text stands for. Raises ConfigError."""
    if value is None or isinstance(value, SpeculativeConfig):
        return value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise _wrong(f"is not JSON: {error}", "speculative_config") from None
    if not isinstance(value, Mapping):
        raise _wrong(f"must be a dictionary, not {type(value).__name__}", "speculative_config")
    names = {field.name for field in dataclasses.fields(SpeculativeConfig)}
    if unknown := sorted(str(key) for key in value if key not in names):
        raise _wrong(f"has unknown keys: {', '.join(unknown)}; known are {', '.join(sorted(names))}", unknown[0])
    return SpeculativeConfig(**value)


def _wrong(what: str, param: str) -> ConfigError:
    return ConfigError(f"speculative_config {what}", param=param)
