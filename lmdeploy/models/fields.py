"""Typed, checked access to a model's description (config.json or GGUF metadata).

Owns the one-line messages for missing, ill-typed and absurd values, and the list of fields that change a
model's mathematics: one that no family has read must have its neutral value. Knows no family.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lmdeploy.errors import ModelError

LARGEST_EXTENT = (
    1 << 24
)  # no dimension of a real model reaches it; a damaged file must not size an allocation
LARGEST_LAYER_COUNT = 4096
LARGEST_HEAD_DIM = 1 << 13

_OFF = (None, False, 0)
# Field -> values that leave the mathematics of a plain decoder unchanged.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": _OFF,
    "attention_out_bias": _OFF,
    "mlp_bias": _OFF,
    "qkv_bias": _OFF,
    "bias": _OFF,
    "use_bias": _OFF,
    "lm_head_bias": _OFF,
    "qk_layernorm": _OFF,
    "use_qk_norm": _OFF,
    "qk_norm": _OFF,
    "clip_qkv": _OFF,
    "use_sliding_window": _OFF,
    "sliding_window": _OFF,
    "attn_logit_softcapping": _OFF,
    "final_logit_softcapping": _OFF,
    "partial_rotary_factor": (None, 1.0),
    "rope_interleaved": _OFF,
    "no_rope_layers": (None, []),
    "attention_chunk_size": _OFF,
    "embedding_multiplier": (None, 1.0),
    "attention_multiplier": (None,),
    "residual_multiplier": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "query_pre_attn_scalar": (None,),
    "scale_emb": (None, 1.0),
    "scale_depth": (None, 1.0),
    "dim_model_base": (None,),
    "num_experts": _OFF,
    "num_local_experts": _OFF,
    "n_routed_experts": _OFF,
    "kv_lora_rank": _OFF,
    "add_cross_attention": _OFF,
    "is_encoder_decoder": _OFF,
    "use_logn_attn": _OFF,
    "alibi": _OFF,
    "attn_temperature_tuning": _OFF,
    "use_bidirectional_attention": _OFF,
    "llama_4_scaling_beta": _OFF,
    "mrope_section": (None,),
    # GGUF metadata, after the architecture's name
    "expert_count": _OFF,
    "attention.sliding_window": _OFF,
    "attention.sliding_window_pattern": (None,),
    "attention.scale": (None,),
    "attention.clamp_kqv": _OFF,
    "attention.max_alibi_bias": _OFF,
    "attention.causal": (None, True),
    "attention.temperature_scale": _OFF,
    "attention.temperature_length": _OFF,
    "rope.scaling.yarn_log_multiplier": _OFF,
    "embedding_scale": (None, 1.0),
    "residual_scale": (None, 1.0),
    "logit_scale": (None, 1.0),
    "rope.scaling.type": (None, "none"),
    "rope.scaling.factor": (None, 0, 1.0),
    "rope.scaling.alpha": (None, 0, 1.0),
    "rope.scaling.yarn_ext_factor": (None, -1.0, 1.0),
    "rope.scale_linear": (None, 0, 1.0),
    "rope.freq_base_swa": (None,),
    "rope.dimension_count_swa": (None,),
    "attention.key_length_swa": (None,),
    "attention.value_length_swa": (None,),
    "attention.shared_kv_layers": _OFF,
    "rope.dimension_sections": (None,),
    "use_parallel_residual": _OFF,
    "nextn_predict_layers": _OFF,
}


def shown(value: Any) -> str:
    """A value as messages show it: short, in one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


class Fields:
    """A mapping that remembers which of its keys were read. `source` names the file in messages."""

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self._values, self.source, self._prefix = values, source, prefix
        self._read: set[str] = set()

    def get(self, key: str) -> Any:
        """The raw value or None; counts as read."""
        self._read.add(key)
        return self._values.get(self._prefix + key)

    def peek(self) -> dict[str, Any]:
        """All that is there, by keys without what comes before them; none of it counts as read."""
        start = len(self._prefix)
        return {key[start:]: x for key, x in self._values.items() if key.startswith(self._prefix)}

    def absent(self, key: str) -> bool:
        """Whether the description does not have the key at all; null is a value ("none of it")."""
        return self._prefix + key not in self._values

    def fail(self, key: str, what: str) -> ModelError:
        return ModelError(f"{self.source}: {self._prefix}{key} {what}.")

    def integer(
        self, key: str, default: int | None = None, *, most: int = LARGEST_EXTENT, layers: int = 0
    ) -> int:
        """A whole number from 1 to `most`. layers: a list of so many equal ones stands for one of them."""
        value = self._given(key, default)
        if layers and isinstance(value, list) and len(value) == layers:
            if any(one != value[0] for one in value):
                raise self.fail(
                    key, f"is {shown(value)}; layers that differ from each other in it are not supported"
                )
            value = value[0]
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.fail(key, f"is {shown(value)}; a whole number from 1 to {most} is expected")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self._given(key, default)
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not math.isfinite(value) or value <= 0:
            raise self.fail(key, f"is {shown(value)}; a finite number above 0 is expected")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._given(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, f"is {shown(value)}; true or false is expected")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._given(key, default)
        if not isinstance(value, str):
            raise self.fail(key, f"is {shown(value)}; a text is expected")
        return value

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of `count` finite numbers above zero."""
        values = self._given(key, None)
        good = isinstance(values, list) and len(values) == count
        if not good or not all(isinstance(x, int | float) and math.isfinite(x) and x > 0 for x in values):
            raise self.fail(key, f"is {shown(values)}; a list of {count} finite numbers above 0 is expected")
        return tuple(float(x) for x in values)

    def choices(self, key: str, count: int, allowed: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """A list of `count` of the allowed values, or None when absent or null."""
        values = self.get(key)
        if values is None:
            return None
        if not isinstance(values, list) or len(values) != count:
            raise self.fail(
                key, f"is {shown(values)}; a list with one entry for each of {count} layers is expected"
            )
        for value in values:
            if value not in allowed:
                known = ", ".join(map(str, allowed))
                raise self.fail(key, f"holds {shown(value)}, which is not supported (supported: {known})")
        return tuple(values)

    def table(self, key: str) -> dict[str, Any] | None:
        """A JSON object, or None when absent or null."""
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.fail(key, f"is {shown(value)}; an object is expected")
        return value

    def _given(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.fail(key, "is missing")
        return value

    def _refuse_layer_types(self) -> None:
        types = self._values.get(self._prefix + "layer_types") or []
        for kind in types if isinstance(types, list) else [types]:
            if kind != "full_attention":
                raise self.fail("layer_types", f"holds {shown(kind)}, which is not supported for this model")

    def refuse_unread(self) -> None:
        """Refuse by name every field that changes the mathematics and was not read by the family."""
        if "layer_types" not in self._read:
            self._refuse_layer_types()
        for key, neutral in _NEUTRAL.items():
            value = self._values.get(self._prefix + key)
            if key not in self._read and not any(value is one or value == one for one in neutral):
                raise self.fail(
                    key,
                    f"is {shown(value)}, which changes the computation and is not supported for this model",
                )
