"""What a family declares, and the readings that families share.

Knows where descriptions usually keep the sizes of a decoder; knows no family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lmdeploy.errors import ModelError
from lmdeploy.models.checkpoint import NameTable
from lmdeploy.models.fields import LARGEST_HEAD_DIM, LARGEST_LAYER_COUNT, Fields, shown
from lmdeploy.models.gguf import GGUFFile
from lmdeploy.models.rope import llama3_divisors, rope_from_hf, usable, yarn_magnitude
from lmdeploy.models.spec import Activation, AttentionSpec, LayerSpec, ModelSpec, NormSpec, RopeSpec

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class Family:
    """One row of the registry: names it answers to, how to read its description, where its tensors are.

    models: the models it is for, as the documentation lists them. hf_text_parts: architectures of which it is
    the language model, described in `text_config`, each with the model_type that this has. from_gguf: None
    when llama.cpp has no such architecture. from_hf and from_gguf raise ModelError naming a field that they
    cannot honour.
    """

    name: str
    models: str
    hf_architectures: tuple[str, ...]
    from_hf: Callable[[Fields], ModelSpec]
    hf_names: NameTable
    hf_text_parts: Mapping[str, str] = field(default_factory=dict)
    gguf_architectures: tuple[str, ...] = ()
    from_gguf: Callable[[Fields, GGUFFile], ModelSpec] | None = None
    gguf_names: NameTable | None = None


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers that every decoder has."""

    hidden: int
    vocab: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    max_position: int
    eps: float
    tied: bool

    def attention(self, rope: RopeSpec | None, scale: float | None = None, **fields: Any) -> AttentionSpec:
        """Scores are divided by the root of the head dimension unless `scale` is given."""
        scale = self.head_dim**-0.5 if scale is None else scale
        return AttentionSpec(self.heads, self.kv_heads, self.head_dim, scale, rope, **fields)

    def hf_rope(self, config: Fields, **given: Any) -> RopeSpec:
        """The rotation that config.json describes; `given` as `rope.rope_from_hf` takes it."""
        return rope_from_hf(config, self.head_dim, self.max_position, **given)

    def model(
        self, family: str, layers: LayerSpec | Sequence[LayerSpec], *, norm_offset: float = 0.0, **fields: Any
    ) -> ModelSpec:
        """layers: one for each, or one for all."""
        layers = (layers,) * self.layers if isinstance(layers, LayerSpec) else tuple(layers)
        return ModelSpec(
            family=family,
            hidden_size=self.hidden,
            vocab_size=self.vocab,
            max_position=self.max_position,
            norm=NormSpec(self.eps, norm_offset),
            layers=layers,
            tie_embeddings=self.tied,
            **fields,
        )


def hf_sizes(
    config: Fields,
    *,
    tied: bool = False,
    eps: float = 1e-6,
    max_position: int = 2048,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    vocab: int | None = None,
) -> Sizes:
    """tied, eps, max_position, heads, vocab: the architecture's values where config.json gives none.

    kv_heads, head_dim: its values where config.json does not have the key; null, and None here, mean as many
    as there are heads, and an equal share of the hidden size.
    """
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads", heads)
    return Sizes(
        hidden=hidden,
        vocab=config.integer("vocab_size", vocab),
        layers=config.integer("num_hidden_layers", most=LARGEST_LAYER_COUNT),
        heads=heads,
        kv_heads=_kv_heads(config, "num_key_value_heads", heads, kv_heads),
        head_dim=_head_dim(config, "head_dim", hidden, heads, head_dim),
        intermediate=config.integer("intermediate_size"),
        max_position=config.integer("max_position_embeddings", max_position),
        eps=config.number("rms_norm_eps", eps),
        tied=config.flag("tie_word_embeddings", tied),
    )


def gguf_sizes(fields: Fields, file: GGUFFile) -> Sizes:
    """From GGUF metadata; embeddings are tied when the file has no output matrix."""
    if fields.get("expert_count") not in (None, 0):
        raise fields.fail(
            "expert_count", f"is {shown(fields.get('expert_count'))}; mixtures of experts are not supported"
        )
    layers = fields.integer("block_count", most=LARGEST_LAYER_COUNT)
    hidden = fields.integer("embedding_length")
    heads = fields.integer("attention.head_count", layers=layers)
    head_dim = _head_dim(fields, "attention.key_length", hidden, heads)
    if fields.integer("attention.value_length", head_dim) != head_dim:
        given = fields.get("attention.value_length")
        raise fields.fail(
            "attention.value_length", f"is {given}; only that of keys, {head_dim}, is supported"
        )
    return Sizes(
        hidden=hidden,
        vocab=fields.integer("vocab_size", _embedding_rows(file)),
        layers=layers,
        heads=heads,
        kv_heads=_kv_heads(fields, "attention.head_count_kv", heads, layers=layers),
        head_dim=head_dim,
        intermediate=fields.integer("feed_forward_length", layers=layers),
        max_position=fields.integer("context_length"),
        eps=fields.number("attention.layer_norm_rms_epsilon"),
        tied="output.weight" not in file.tensors,
    )


def _head_dim(fields: Fields, key: str, hidden: int, heads: int, absent: int | None = None) -> int:
    if absent is not None and fields.absent(key):
        return absent
    if fields.get(key) is None and hidden % heads:
        raise fields.fail(
            key, f"is missing and the hidden size, {hidden}, is no multiple of the {heads} heads"
        )
    head_dim = fields.integer(key, max(1, hidden // heads), most=LARGEST_HEAD_DIM)
    if head_dim % 2:
        raise fields.fail(key, f"is {head_dim}; rotary embedding needs an even head dimension")
    return head_dim


def _kv_heads(fields: Fields, key: str, heads: int, absent: int | None = None, layers: int = 0) -> int:
    kv_heads = fields.integer(key, absent if absent and fields.absent(key) else heads, layers=layers)
    if heads % kv_heads:
        raise fields.fail(key, f"is {kv_heads}, which does not divide the {heads} attention heads")
    return kv_heads


def _embedding_rows(file: GGUFFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path}: tensor 'token_embd.weight' is missing.")
    return file.tensors["token_embd.weight"].shape[0]


def activation(config: Fields, key: str = "hidden_act", default: str = "silu") -> Activation:
    """The activation of a gated block; ModelError naming it when it is none of the known ones."""
    name = config.text(key, default)
    if name not in _ACTIVATIONS:
        raise config.fail(key, f"is {name!r}, which is not supported (supported: {', '.join(_ACTIVATIONS)})")
    return _ACTIVATIONS[name]


def positive(config: Fields, key: str, absent: float | None = None) -> float | None:
    """A finite number above zero, or None when null or 0 (off). absent: where there is no such key."""
    if config.absent(key):
        return absent
    return None if config.get(key) in (None, 0) else config.number(key)


def window(config: Fields, key: str = "sliding_window", absent: int | None = None) -> int | None:
    """Tokens of a sliding window; None when null or 0 (off). absent: where there is no such key."""
    if config.absent(key):
        return absent
    return None if config.get(key) in (None, 0) else config.integer(key)


def sliding_layers(config: Fields, layers: int, default: Sequence[bool]) -> Sequence[bool]:
    """Which layers have a window: from `layer_types`, else `default`."""
    types = config.choices("layer_types", layers, _LAYER_TYPES)
    return default if types is None else [kind == "sliding_attention" for kind in types]


def gguf_sliding_layers(fields: Fields, layers: int, period: int) -> Sequence[bool]:
    """Which layers have a window: all but each `period`-th, unless the file lists them."""
    key = "attention.sliding_window_pattern"
    if isinstance(fields.get(key), list):
        return fields.choices(key, layers, (True, False)) or ()
    period = fields.integer(key, period)
    return [i % period < period - 1 for i in range(layers)]


def gguf_rope(fields: Fields, file: GGUFFile, head_dim: int, longrope: bool = False) -> RopeSpec:
    """none, linear, yarn, and the divisors that converters write for Llama 3.1.

    longrope: whether the family reads its two lists; where it does not, a file of that kind is refused.
    """
    rope = _gguf_rope(fields, file, head_dim, longrope)
    if not usable(rope):
        raise fields.fail("rope.scaling.type", "and what belongs to it do not give finite frequencies")
    if GGUF_FREQUENCIES in file.tensors and rope.kind != "llama3":
        raise ModelError(f"{file.path}: holds {GGUF_FREQUENCIES} beside rope.scaling.type {rope.kind!r}.")
    return rope


def _gguf_rope(fields: Fields, file: GGUFFile, head_dim: int, longrope: bool) -> RopeSpec:
    theta = fields.number("rope.freq_base", 10000.0)
    dim = fields.integer("rope.dimension_count", head_dim)
    if dim > head_dim or dim % 2:
        raise fields.fail("rope.dimension_count", f"is {dim}; an even number up to {head_dim} is expected")
    factor, kind = _gguf_factor(fields), fields.text("rope.scaling.type", "linear")
    if kind == "yarn":
        return _gguf_yarn(fields, theta, dim)
    known = ("none", "linear", "yarn", *["longrope"] * longrope)
    if kind not in known:
        raise fields.fail(
            "rope.scaling.type", f"is {shown(kind)}, which is not supported (supported: {', '.join(known)})"
        )
    if kind == "linear" and factor != 1.0:
        return RopeSpec(theta, dim, "linear", factor)
    if kind == "longrope" and factor != 1.0:
        raise fields.fail("rope.scaling.factor", f"is {factor}, which longrope has no use for")
    return _gguf_llama3(file, theta, dim) if GGUF_FREQUENCIES in file.tensors else RopeSpec(theta, dim)


def _gguf_factor(fields: Fields) -> float:
    """Under its own key or its old one; 1 when absent or 0. llama.cpp takes it for linear without a type."""
    values = [fields.get(key) for key in (_FACTOR, "rope.scale_linear")]
    if values[0] is None:
        return fields.number("rope.scale_linear") if values[1] not in (None, 0) else 1.0
    return fields.number(_FACTOR) if values[0] != 0 else 1.0


GGUF_FREQUENCIES, _FACTOR = "rope_freqs.weight", "rope.scaling.factor"


def _gguf_yarn(fields: Fields, theta: float, dim: int) -> RopeSpec:
    factor = fields.number(_FACTOR)
    given = fields.number("rope.scaling.yarn_attn_factor", 1.0) * fields.number(
        "rope.scaling.attn_factor", 1.0
    )
    return RopeSpec(
        theta,
        dim,
        "yarn",
        factor,
        original_max_position=fields.integer(
            "rope.scaling.original_context_length", fields.integer("context_length")
        ),
        attention_factor=yarn_magnitude(factor) * given,
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def _gguf_llama3(file: GGUFFile, theta: float, dim: int) -> RopeSpec:
    divisors = np.asarray(file.read("rope_freqs.weight"), np.float64)
    # The file keeps only the divisors of the frequencies; the public models all use 1, 4 and 8192.
    rope = RopeSpec(theta, dim, "llama3", float(divisors.max()), 1.0, 4.0, 8192)
    expected = llama3_divisors(rope)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-5):
        raise ModelError(f"{file.path}: rope_freqs.weight holds frequencies other than those of Llama 3.1.")
    return rope
