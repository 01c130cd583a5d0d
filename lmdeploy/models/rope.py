"""Rotary position embedding: reading its parameters from config.json and computing its frequencies.

Knows no family and no executor; executors take the frequencies from here, so that the formula exists once.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from lmdeploy.models.fields import Fields, shown
from lmdeploy.models.spec import RopeSpec

SUPPORTED = ("default", "linear", "llama3")


def rope_from_hf(config: Fields, head_dim: int, default_theta: float = 10000.0) -> RopeSpec:
    """From `rope_parameters`, or from `rope_theta` and `rope_scaling` as older files write it.

    Raises ModelError naming the kind when it is not one of `SUPPORTED`.
    """
    parameters, scaling = config.table("rope_parameters"), config.table("rope_scaling")
    key = "rope_parameters" if parameters is not None else "rope_scaling"
    values: dict[str, Any] = dict(parameters if parameters is not None else scaling or {})
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind not in SUPPORTED:
        raise config.fail(
            key, f"is of kind {shown(kind)}, which is not supported (supported: {', '.join(SUPPORTED)})"
        )
    fields = Fields(values, f"{config.source}: {key}")
    partial = config.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise config.fail(
            "partial_rotary_factor", f"is {shown(partial)}, which is not supported (supported: 1.0)"
        )
    theta = fields.number("rope_theta", config.number("rope_theta", default_theta))
    if kind == "default":
        return RopeSpec(theta, head_dim)
    factor = fields.number("factor")
    if kind == "linear":
        return RopeSpec(theta, head_dim, "linear", factor)
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if high <= low:
        raise fields.fail("high_freq_factor", f"is {high}; it must be above low_freq_factor, {low}")
    original = fields.integer("original_max_position_embeddings")
    return RopeSpec(theta, head_dim, "llama3", factor, low, high, original)


def inverse_frequencies(rope: RopeSpec) -> npt.NDArray[np.float64]:
    """Angle per position of each rotary pair, float64 [rotary_dim / 2].

    linear divides all by the factor (Chen et al. 2023). llama3 (Llama 3.1 model card) keeps wavelengths
    shorter than original / high_freq_factor, divides those longer than original / low_freq_factor by the
    factor, and blends between the two.
    """
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    frequencies = rope.theta**-exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    return frequencies / llama3_divisors(rope) if rope.kind == "llama3" else frequencies


def llama3_divisors(rope: RopeSpec) -> npt.NDArray[np.float64]:
    """What llama3 scaling divides each plain frequency by, float64 [rotary_dim / 2], from 1 to `factor`."""
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    turns = rope.original_max_position * rope.theta**-exponents / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return np.asarray(1.0 / (blend + (1.0 - blend) / rope.factor))
