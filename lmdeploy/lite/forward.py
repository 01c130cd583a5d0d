"""One layer of a model over calibration windows, and what its matrices are fed on the way.

The arithmetic is `models.reference.Decoder`'s; here are attention over whole windows and the observer.
Knows no file and no rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial

import torch
from torch.nn import functional

from lmdeploy.models.reference import ACTIVATIONS, Decoder, Turn, masked_scores, visible
from lmdeploy.models.spec import Activation, AttentionSpec, ModelSpec, RopeSpec

Observe = Callable[[str, torch.Tensor], None]  # name of a matrix without its layer, its input [tokens, K]
_QUERIES = 256  # at once, where scores must be kept


class LayerForward:
    """Layer `index` with weights by canonical name without the prefix `layers.{index}.`."""

    def __init__(
        self,
        spec: ModelSpec,
        index: int,
        weights: Mapping[str, torch.Tensor],
        observe: Observe | None = None,
        *,
        without: str = "",
        rounded: Collection[str] = (),
    ) -> None:
        """without: a matrix whose product is taken as zeros, where outputs are not wanted. rounded: matrices
        whose inputs are rounded to 8 bits, token by token."""
        prefix = f"layers.{index}."
        named = {prefix + name: value for name, value in weights.items()}
        if observe:
            self._decoder: Decoder = _Observed(spec, named, prefix, observe, without)
        else:
            self._decoder = _Fast(spec, named, frozenset(prefix + name for name in rounded))
        self._spec, self._index = spec, index
        self._turns: dict[tuple[int, int], dict[RopeSpec, Turn]] = {}  # of the sizes that came last

    def __call__(self, x: torch.Tensor, count: int = 1) -> torch.Tensor:
        """The layer's output, float32 [tokens, hidden], for the input of `count` windows of one length, one
        after the other."""
        scale = self._spec.layers[self._index].residual_scale
        x = x + self.attention(x, count) * scale
        return x + self.ffn(x) * scale

    def attention(self, x: torch.Tensor, count: int = 1) -> torch.Tensor:
        """What attention adds, before `residual_scale`."""
        if (len(x), count) not in self._turns:
            positions = torch.arange(len(x) // count, device=x.device).repeat(count)
            self._turns = {(len(x), count): self._decoder.turns(positions)}
        turns = self._turns[len(x), count]
        return self._decoder.attention_block(self._index, x, turns, partial(over_windows, count))

    def ffn(self, x: torch.Tensor) -> torch.Tensor:
        """What the feed-forward block adds to x, which has attention's output in it."""
        return self._decoder.ffn_block(self._index, x)


class _Fast(Decoder):
    """Activations of all values at once: which bits a value gets may depend on where it stands, which only
    engines must avoid. rounded: full names of the matrices that multiply bytes."""

    def __init__(
        self, spec: ModelSpec, weights: Mapping[str, torch.Tensor], rounded: Collection[str] = ()
    ) -> None:
        super().__init__(spec, weights)
        self._rounded = rounded

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return super().linear(name, as_bytes(x) if name in self._rounded else x)

    def activate(self, kind: Activation, x: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[kind](x)


class _Observed(_Fast):
    """Tells what each matrix is fed, once for matrices with the same input."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, torch.Tensor],
        prefix: str,
        observe: Observe,
        without: str,
    ) -> None:
        super().__init__(spec, weights)
        self._prefix, self._observe, self._without = prefix, observe, without

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        local = name.removeprefix(self._prefix)
        self._observe(local, x)
        if local == self._without:
            return x.new_zeros(len(x), self.spec.hidden_size)
        return super().linear(name, x)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, K] rounded to 255 steps, one symmetric scale for each token."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return (x / scale).round() * scale


def over_windows(
    count: int, layer: int, a: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Causal attention inside each of `count` windows: q [tokens, heads, head_dim], k and v [tokens,
    kv_heads, head_dim]."""
    group, length = a.num_heads // a.num_kv_heads, len(q) // count
    queries, keys, values = (x.view(count, length, -1, a.head_dim).transpose(1, 2) for x in (q, k, v))
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    if a.softcap is None and (a.window is None or a.window >= length):
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=a.scale)
    else:
        mixed = _masked(a, *(x.flatten(0, 1) for x in (queries, keys, values))).view(queries.shape)
    return mixed.transpose(1, 2).reshape(len(q), -1)


def _masked(
    a: AttentionSpec, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """All [heads, tokens, head_dim]; some queries at a time."""
    positions = torch.arange(queries.shape[1], device=queries.device)
    pieces = []
    for begin in range(0, queries.shape[1], _QUERIES):
        some = slice(begin, begin + _QUERIES)
        seen = visible(positions[some], positions, a.window)
        pieces.append(torch.softmax(masked_scores(queries[:, some], keys, a, seen), -1) @ values)
    return torch.cat(pieces, 1)
