"""What a model is, as data: read by every executor, the quantiser, the planner and the reference.

A flag describes mathematics, never a family. No arrays, no files, no arithmetic beyond counting.

Canonical tensor names (what `checkpoint.py` serves):
    embed.weight [vocab, hidden]    norm.weight [hidden]    lm_head.weight [vocab, hidden] (absent when tied)
    layers.{i}.attn.{q,k,v,o}_proj.{weight,bias}     layers.{i}.attn.{q,k}_norm.weight
    layers.{i}.ffn.{gate,up,down}_proj.{weight,bias}
    layers.{i}.{attn,ffn}_norm.weight (before the block)     layers.{i}.{attn,ffn}_post_norm.weight (after it)
Linear weights are [out_features, in_features]. Rotary pairs are (d, d + rotary_dim / 2): families that store
another order are brought to this one by the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]
Activation = Literal["silu", "gelu_tanh", "gelu"]
FfnKind = Literal["gated", "experts"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021) over the first `rotary_dim` values of a head.

    `rope.inverse_frequencies` says which fields each kind uses. Cosines and sines are multiplied by
    `attention_factor`. `length`: tokens of the longest sequence computed with it, for kinds whose frequencies
    depend on that (dynamic, longrope); one number for all sequences, see docs/decisions/0006.
    """

    theta: float
    rotary_dim: int
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    length: int = 0

    @property
    def depends_on_length(self) -> bool:
        return self.kind in ("dynamic", "longrope")

    def for_length(self, length: int) -> RopeSpec:
        """The same for sequences of up to `length` tokens."""
        return replace(self, length=length) if self.depends_on_length else self


@dataclass(frozen=True, slots=True)
class NormSpec:
    """RMS norm: y = x / rms(x) * (weight + offset)."""

    eps: float
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """One matrix. `name` is the canonical prefix; `fed_by` names the tensor whose output it multiplies."""

    name: str
    out_features: int
    in_features: int
    bias: bool
    fed_by: str
    shard_axis: Literal["out", "in"]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention; scores are q.k * scale.

    qk_norm: RMS norm of each query and key head; with qk_norm_across_heads, of all heads of a token as one
    vector, before they are cut into heads.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    qk_norm_across_heads: bool = False
    window: int | None = None  # attends to the last `window` tokens, itself included
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class FfnSpec:
    """Gated feed-forward block: down(act(gate(x)) * up(x)).

    Other kinds can be described, so that the dense layers beside them can be; executors refuse them by name.
    """

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False
    kind: FfnKind = "gated"


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """x += post(attn(pre(x))); x += post(ffn(pre(x))); either norm may be absent."""

    attention: AttentionSpec
    ffn: FfnSpec
    pre_norm: bool = True
    post_norm: bool = False
    residual_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer."""

    family: str
    hidden_size: int
    vocab_size: int
    max_position: int
    norm: NormSpec
    layers: tuple[LayerSpec, ...]
    tie_embeddings: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    def for_length(self, length: int) -> ModelSpec:
        """The model for sequences of up to `length` tokens: settles frequencies that depend on it."""
        layers = []
        for layer in self.layers:
            rope = layer.attention.rope
            if rope is not None:
                layer = replace(layer, attention=replace(layer.attention, rope=rope.for_length(length)))
            layers.append(layer)
        return replace(self, layers=tuple(layers))

    def linears(self, layer: int) -> Iterator[LinearSpec]:
        """The matrices of one layer, in the order they are used; of a gated block only."""
        spec, h, p = self.layers[layer], self.hidden_size, f"layers.{layer}"
        a, f = spec.attention, spec.ffn
        q, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        attn_in = f"{p}.attn_norm" if spec.pre_norm else f"{p}.input"
        ffn_in = f"{p}.ffn_norm" if spec.pre_norm else f"{p}.attn_output"
        yield LinearSpec(f"{p}.attn.q_proj", q, h, a.qkv_bias, attn_in, "out")
        yield LinearSpec(f"{p}.attn.k_proj", kv, h, a.qkv_bias, attn_in, "out")
        yield LinearSpec(f"{p}.attn.v_proj", kv, h, a.qkv_bias, attn_in, "out")
        yield LinearSpec(f"{p}.attn.o_proj", h, q, a.out_bias, f"{p}.attn.v_proj", "in")
        if f.kind != "gated":
            return
        yield LinearSpec(f"{p}.ffn.gate_proj", f.intermediate_size, h, f.bias, ffn_in, "out")
        yield LinearSpec(f"{p}.ffn.up_proj", f.intermediate_size, h, f.bias, ffn_in, "out")
        yield LinearSpec(f"{p}.ffn.down_proj", h, f.intermediate_size, f.bias, f"{p}.ffn.up_proj", "in")

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Canonical name and shape of every tensor a checkpoint must hold, in the order they are used."""
        h = self.hidden_size
        yield "embed.weight", (self.vocab_size, h)
        for i, layer in enumerate(self.layers):
            for linear in self.linears(i):
                yield f"{linear.name}.weight", (linear.out_features, linear.in_features)
                if linear.bias:
                    yield f"{linear.name}.bias", (linear.out_features,)
            a = layer.attention
            if a.qk_norm:
                q_heads, k_heads = (a.num_heads, a.num_kv_heads) if a.qk_norm_across_heads else (1, 1)
                yield f"layers.{i}.attn.q_norm.weight", (q_heads * a.head_dim,)
                yield f"layers.{i}.attn.k_norm.weight", (k_heads * a.head_dim,)
            for place in ["norm"] * layer.pre_norm + ["post_norm"] * layer.post_norm:
                yield f"layers.{i}.attn_{place}.weight", (h,)
                yield f"layers.{i}.ffn_{place}.weight", (h,)
        yield "norm.weight", (h,)
        if not self.tie_embeddings:
            yield "lm_head.weight", (self.vocab_size, h)

    def kv_bytes_per_token(self, value_bytes: int = 2) -> int:
        """Bytes of keys and values one token takes: 2 x kv_heads x head_dim x bytes, summed over layers."""
        return sum(2 * x.attention.num_kv_heads * x.attention.head_dim * value_bytes for x in self.layers)
