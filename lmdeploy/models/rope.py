"""Rotary position embedding: reading its parameters from config.json and computing its frequencies.

Knows no family and no executor; executors take the frequencies from here, so that the formula exists once.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from lmdeploy.models.fields import Fields, shown
from lmdeploy.models.spec import RopeKind, RopeSpec

SUPPORTED: tuple[RopeKind, ...] = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


def rope_from_hf(
    config: Fields,
    head_dim: int,
    longest: int,
    *,
    theta: float = 10000.0,
    partial: float | None = None,
    layer_type: str | None = None,
) -> RopeSpec:
    """From `rope_parameters`, or from `rope_theta` and `rope_scaling` as older files write it.

    Where both are there, `rope_scaling` is followed if it only adds to a plain rotation, and refused if the
    two differ otherwise. longest: the model's own longest sequence. theta, partial: the architecture's values
    where the file gives none; without `partial`, heads are turned whole and a file that says otherwise is
    refused. layer_type: the entry to take when `rope_parameters` holds one for each type of layer. ModelError
    names the kind when it is not one of `SUPPORTED`.
    """
    found = {key: config.table(key) or {} for key in ("rope_parameters", "rope_scaling")}
    own = found["rope_parameters"].get(layer_type or "")
    if isinstance(own, dict):
        # What stands beside a table of layer types was always meant for those without a window.
        beside = found["rope_scaling"] if layer_type == "full_attention" else {}
        found = {"rope_parameters": own, "rope_scaling": {**own, **beside} if beside else {}}
    tables = {key: values for key, values in found.items() if values} or {"rope_parameters": {}}
    first, *others = [
        _rope(config, Fields(values, f"{config.source}: {key}"), key, head_dim, longest, theta, partial)
        for key, values in tables.items()
    ]
    if not others or first == others[0]:
        return first
    if first != RopeSpec(others[0].theta, others[0].rotary_dim):
        raise config.fail(
            "rope_scaling", "and rope_parameters describe different rotations; keep one, with its rope_theta"
        )
    return others[0]


def _rope(
    config: Fields,
    fields: Fields,
    key: str,
    head_dim: int,
    longest: int,
    theta: float,
    partial: float | None,
) -> RopeSpec:
    """The rotation that one object describes; `key` is its name."""
    kind = _kind(config, fields, key)
    theta = fields.number("rope_theta", config.number("rope_theta", theta))
    if theta <= 1.0:
        raise config.fail("rope_theta", f"is {theta}; a number above 1 is expected")
    rotary_dim = head_dim if partial is None else _turned(config, fields, head_dim, partial)
    fields.refuse_unread()
    rope = _READERS[kind](config, fields, RopeSpec(theta, rotary_dim), longest)
    if not usable(rope):
        raise config.fail(key, "does not give finite frequencies")
    return rope


def _kind(config: Fields, fields: Fields, key: str) -> RopeKind:
    given = {name: value for name, value in fields.peek().items() if value is not None}
    for name, value in given.items():
        if isinstance(value, dict):
            raise fields.fail(name, "describes one type of layer, which is not supported for this model")
    kind = fields.get("rope_type") or fields.get("type")
    if kind is None or kind == "":
        # Without such a key, what else is there means nothing to transformers either.
        named = not (fields.absent("rope_type") and fields.absent("type"))
        rest = given.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
        if named and rest:
            raise fields.fail("rope_type", f"names no kind of scaling, although {min(rest)} is given")
        return "default"
    # Files of the first Phi-3 models call longrope "su" or "yarn"; the two lists of factors tell.
    if kind in ("su", "yarn") and fields.get("long_factor") is not None:
        return "longrope"
    for known in SUPPORTED:
        if kind == known:
            return known
    raise config.fail(
        key, f"is of kind {shown(kind)}, which is not supported (supported: {', '.join(SUPPORTED)})"
    )


def _turned(config: Fields, fields: Fields, head_dim: int, partial: float) -> int:
    """Values of each head that are turned."""
    share = fields.number("partial_rotary_factor", config.number("partial_rotary_factor", partial))
    turned = int(head_dim * share)
    if share > 1.0 or turned % 2 or turned < 2:
        raise config.fail(
            "partial_rotary_factor", f"is {share}: an even number of at most {head_dim} values must be turned"
        )
    return turned


def usable(rope: RopeSpec) -> bool:
    """Whether its numbers, each possible by itself, give frequencies together."""
    try:
        return bool(np.isfinite(inverse_frequencies(rope)).all())
    except (ArithmeticError, ValueError):
        return False


def _original(config: Fields, fields: Fields, default: int | None = None) -> int:
    """The longest sequence before scaling. That beside the object wins where there are both."""
    key = "original_max_position_embeddings"
    return (fields if config.get(key) is None else config).integer(key, default)


def _default(config: Fields, fields: Fields, plain: RopeSpec, longest: int) -> RopeSpec:
    return plain


def _linear(config: Fields, fields: Fields, plain: RopeSpec, longest: int) -> RopeSpec:
    return RopeSpec(plain.theta, plain.rotary_dim, "linear", fields.number("factor"))


def _dynamic(config: Fields, fields: Fields, plain: RopeSpec, longest: int) -> RopeSpec:
    return RopeSpec(
        plain.theta,
        plain.rotary_dim,
        "dynamic",
        fields.number("factor"),
        original_max_position=longest,
        length=longest,
    )


def _llama3(config: Fields, fields: Fields, plain: RopeSpec, longest: int) -> RopeSpec:
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if high <= low:
        raise fields.fail("high_freq_factor", f"is {high}; it must be above low_freq_factor, {low}")
    factor, original = fields.number("factor"), _original(config, fields)
    return RopeSpec(plain.theta, plain.rotary_dim, "llama3", factor, low, high, original)


def _yarn(config: Fields, fields: Fields, plain: RopeSpec, longest: int) -> RopeSpec:
    original, factor = _original(config, fields, longest), fields.number("factor")
    return RopeSpec(
        plain.theta,
        plain.rotary_dim,
        "yarn",
        factor,
        original_max_position=original,
        attention_factor=_yarn_attention(fields, factor),
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        truncate=fields.flag("truncate", True),
    )


def _yarn_attention(fields: Fields, factor: float) -> float:
    if fields.get("attention_factor") is not None:
        return fields.number("attention_factor")
    if fields.get("mscale") and fields.get("mscale_all_dim"):
        wanted, given = fields.number("mscale"), fields.number("mscale_all_dim")
        return yarn_magnitude(factor, wanted) / yarn_magnitude(factor, given)
    return yarn_magnitude(factor)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """What YaRN multiplies cosines and sines by (Peng et al. 2023, equation 22)."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(config: Fields, fields: Fields, plain: RopeSpec, longest: int) -> RopeSpec:
    original = _original(config, fields, longest)
    factor = fields.number("factor", longest / original)
    pairs = plain.rotary_dim // 2
    return RopeSpec(
        plain.theta,
        plain.rotary_dim,
        "longrope",
        original_max_position=original,
        attention_factor=fields.number("attention_factor", longrope_magnitude(factor, original)),
        short_factors=fields.numbers("short_factor", pairs),
        long_factors=fields.numbers("long_factor", pairs),
        length=longest,
    )


def longrope_magnitude(factor: float, original: int) -> float:
    """What LongRoPE multiplies cosines and sines by (Ding et al. 2024)."""
    if factor <= 1.0 or original <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original))


_READERS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}


def inverse_frequencies(rope: RopeSpec) -> npt.NDArray[np.float64]:
    """Angle per position of each rotary pair, float64 [rotary_dim / 2].

    default: theta^(-2i / rotary_dim). linear divides all by the factor (Chen et al. 2023). dynamic raises
    theta with `length` beyond original_max_position ("NTK-aware" scaling). yarn divides long wavelengths by
    the factor, keeps short ones and blends by index between (Peng et al. 2023). llama3 (Llama 3.1 model card)
    keeps wavelengths shorter than original / high_freq_factor, divides those longer than original /
    low_freq_factor by the factor, and blends between the two. longrope divides each by its own number, from
    one list up to original_max_position and from another beyond (Ding et al. 2024).
    """
    if rope.kind == "dynamic":
        return _plain(_raised_theta(rope), rope.rotary_dim)
    frequencies = _plain(rope.theta, rope.rotary_dim)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "yarn":
        kept = _yarn_kept(rope)
        return frequencies * kept + frequencies / rope.factor * (1 - kept)
    if rope.kind == "longrope":
        beyond = rope.length > rope.original_max_position
        factors = np.asarray(rope.long_factors if beyond else rope.short_factors, np.float64)
        return np.asarray(frequencies / factors)
    return frequencies / llama3_divisors(rope) if rope.kind == "llama3" else frequencies


def _plain(theta: float, rotary_dim: int) -> npt.NDArray[np.float64]:
    return np.asarray(theta ** -(np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim))


def _raised_theta(rope: RopeSpec) -> float:
    if rope.rotary_dim <= 2:
        return rope.theta
    stretch = max(rope.length / rope.original_max_position, 1.0)
    power = rope.rotary_dim / (rope.rotary_dim - 2)
    return float(rope.theta * (rope.factor * stretch - (rope.factor - 1)) ** power)


def _yarn_kept(rope: RopeSpec) -> npt.NDArray[np.float64]:
    """Share of each plain frequency that is kept, float64 [rotary_dim / 2], from 1 (fast) to 0 (slow)."""

    def index(turns: float) -> float:  # of the pair that makes so many turns within the original length
        wavelength = rope.original_max_position / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = index(rope.beta_fast), index(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    width = high - low or 0.001
    ramp = (np.arange(rope.rotary_dim // 2, dtype=np.float64) - low) / width
    return np.asarray(1.0 - np.clip(ramp, 0.0, 1.0))


def llama3_divisors(rope: RopeSpec) -> npt.NDArray[np.float64]:
    """What llama3 scaling divides each plain frequency by, float64 [rotary_dim / 2], from 1 to `factor`."""
    turns = rope.original_max_position * _plain(rope.theta, rope.rotary_dim) / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return np.asarray(1.0 / (blend + (1.0 - blend) / rope.factor))
