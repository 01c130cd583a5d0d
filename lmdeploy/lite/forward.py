"""One layer of a model over calibration windows, and what its matrices are fed on the way.

The arithmetic is `models.reference.Decoder`'s; here are attention over one whole window and the observer.
Knows no file and no rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from lmdeploy.models.reference import Decoder, masked_scores, visible
from lmdeploy.models.spec import AttentionSpec, ModelSpec

Observe = Callable[[str, torch.Tensor], None]  # name of a matrix without its layer, its input [tokens, K]
_QUERIES = 256  # at once, where scores must be kept


class LayerForward:
    """Layer `index` with weights by canonical name without the prefix `layers.{index}.`."""

    def __init__(
        self, spec: ModelSpec, index: int, weights: Mapping[str, torch.Tensor], observe: Observe | None = None
    ) -> None:
        prefix = f"layers.{index}."
        named = {prefix + name: value for name, value in weights.items()}
        self._decoder = _Observed(spec, named, prefix, observe) if observe else Decoder(spec, named)
        self._spec, self._index = spec, index

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output, float32 [tokens, hidden], for the input of one window."""
        scale = self._spec.layers[self._index].residual_scale
        x = x + self.attention(x) * scale
        return x + self.ffn(x) * scale

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        """What attention adds, before `residual_scale`."""
        turns = self._decoder.turns(torch.arange(len(x), device=x.device))
        return self._decoder.attention_block(self._index, x, turns, over_window)

    def ffn(self, x: torch.Tensor) -> torch.Tensor:
        """What the feed-forward block adds to x, which has attention's output in it."""
        return self._decoder.ffn_block(self._index, x)


class _Observed(Decoder):
    """Tells what each matrix is fed, once for matrices with the same input."""

    def __init__(
        self, spec: ModelSpec, weights: Mapping[str, torch.Tensor], prefix: str, observe: Observe
    ) -> None:
        super().__init__(spec, weights)
        self._prefix, self._observe = prefix, observe

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        self._observe(name.removeprefix(self._prefix), x)
        return super().linear(name, x)


def over_window(
    layer: int, a: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Causal attention of one window: q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim]."""
    group = a.num_heads // a.num_kv_heads
    queries = q.transpose(0, 1)
    keys, values = (x.transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
    if a.softcap is None and (a.window is None or a.window >= len(q)):
        mixed = functional.scaled_dot_product_attention(
            queries[None], keys[None], values[None], is_causal=True, scale=a.scale
        )[0]
        return mixed.transpose(0, 1).reshape(len(q), -1)
    positions = torch.arange(len(q), device=q.device)
    pieces = []
    for begin in range(0, len(q), _QUERIES):
        some = slice(begin, begin + _QUERIES)
        seen = visible(positions[some], positions, a.window)
        pieces.append(torch.softmax(masked_scores(queries[:, some], keys, a, seen), -1) @ values)
    return torch.cat(pieces, 1).transpose(0, 1).reshape(len(q), -1)
