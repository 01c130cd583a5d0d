"""The model in plain torch, float32, straight from the spec: the oracle that executors are compared with.

Readable before fast: no cache blocks, no fusion, one sequence at a time, attention over the whole sequence or
over the keys and values of an earlier call. The only module of `models` that imports torch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from lmdeploy.errors import ModelError
from lmdeploy.models.checkpoint import Checkpoint
from lmdeploy.models.rope import inverse_frequencies
from lmdeploy.models.spec import AttentionSpec, FfnSpec, LayerSpec, ModelSpec, RopeSpec
from lmdeploy.quant.tensors import GroupedTensor

Past = list[tuple[torch.Tensor, torch.Tensor]]  # per layer: keys, values [kv_heads, tokens, head_dim]
Weights = Callable[[str], torch.Tensor]

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


class Reference:
    """Holds all weights as float32 tensors."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec | None = None) -> None:
        """spec: in place of the checkpoint's, for a length (`ModelSpec.for_length`). ModelError when a layer
        cannot be computed."""
        self.spec: ModelSpec = spec or checkpoint.spec
        for kind in {layer.ffn.kind for layer in self.spec.layers} - {"gated"}:
            raise ModelError(f"a feed-forward block of kind {kind!r} is not supported (supported: gated)")
        self._weights = {name: _float32(checkpoint, name) for name in checkpoint.names()}

    def logits(self, ids: npt.ArrayLike, past: Past | None = None) -> npt.NDArray[np.float32]:
        """Logits float32 [len(ids), vocab] of the tokens `ids` that follow those in `past`.

        past: a list to keep between calls (start with []); it is extended in place. None: a whole sequence.
        """
        with torch.no_grad():
            logits = self._forward(torch.as_tensor(np.asarray(ids, np.int64)), [] if past is None else past)
        return np.asarray(logits.numpy(), np.float32)

    def _forward(self, tokens: torch.Tensor, past: Past) -> torch.Tensor:
        start = past[0][0].shape[1] if past else 0
        positions = torch.arange(start, start + len(tokens))
        x = self._weights["embed.weight"][tokens] * self.spec.embedding_scale
        for i, layer in enumerate(self.spec.layers):
            if i == len(past):
                empty = torch.zeros(layer.attention.num_kv_heads, 0, layer.attention.head_dim)
                past.append((empty, empty))
            x, past[i] = self._layer(i, layer, x, positions, past[i])
        x = self._norm("norm", x)
        head = "embed.weight" if self.spec.tie_embeddings else "lm_head.weight"
        return _softcap(x @ self._weights[head].T * self.spec.logit_scale, self.spec.logit_softcap)

    def _layer(
        self,
        i: int,
        layer: LayerSpec,
        x: torch.Tensor,
        positions: torch.Tensor,
        past: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        name = f"layers.{i}"
        h = self._norm(f"{name}.attn_norm", x) if layer.pre_norm else x
        h, past = self._attention(f"{name}.attn", layer.attention, h, positions, past)
        h = self._norm(f"{name}.attn_post_norm", h) if layer.post_norm else h
        x = x + h * layer.residual_scale
        h = self._norm(f"{name}.ffn_norm", x) if layer.pre_norm else x
        h = self._ffn(f"{name}.ffn", layer.ffn, h)
        h = self._norm(f"{name}.ffn_post_norm", h) if layer.post_norm else h
        return x + h * layer.residual_scale, past

    def _attention(
        self,
        name: str,
        a: AttentionSpec,
        x: torch.Tensor,
        positions: torch.Tensor,
        past: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        n = len(x)
        q, k, v = (self._linear(f"{name}.{part}_proj", x) for part in "qkv")
        if a.qk_norm_across_heads:
            q, k = self._norm(f"{name}.q_norm", q), self._norm(f"{name}.k_norm", k)
        q = q.view(n, a.num_heads, a.head_dim).transpose(0, 1)
        k, v = (y.view(n, a.num_kv_heads, a.head_dim).transpose(0, 1) for y in (k, v))
        if a.qk_norm and not a.qk_norm_across_heads:
            q, k = self._norm(f"{name}.q_norm", q), self._norm(f"{name}.k_norm", k)
        if a.rope is not None:
            q, k = rotate(q, positions, a.rope), rotate(k, positions, a.rope)
        keys, values = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        group = a.num_heads // a.num_kv_heads
        scores = q @ keys.repeat_interleave(group, 0).transpose(1, 2) * a.scale
        scores = _softcap(scores, a.softcap).masked_fill(
            ~_visible(positions, keys.shape[1], a.window), -torch.inf
        )
        mixed = torch.softmax(scores, -1) @ values.repeat_interleave(group, 0)
        return self._linear(f"{name}.o_proj", mixed.transpose(0, 1).reshape(n, -1)), (keys, values)

    def _ffn(self, name: str, ffn: FfnSpec, x: torch.Tensor) -> torch.Tensor:
        gate = _ACTIVATIONS[ffn.activation](self._linear(f"{name}.gate_proj", x))
        return self._linear(f"{name}.down_proj", gate * self._linear(f"{name}.up_proj", x))

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        spec = self.spec.norm
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + spec.eps)
        return scaled * (self._weights[f"{name}.weight"] + spec.offset)


def rotate(x: torch.Tensor, positions: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """x [heads, tokens, head_dim]: pairs (d, d + rotary_dim / 2) turned by position x frequency."""
    angles = positions[:, None].double() * torch.from_numpy(inverse_frequencies(rope))
    cos, sin = ((rope.attention_factor * y).float() for y in (angles.cos(), angles.sin()))
    half = rope.rotary_dim // 2
    first, second, rest = x[..., :half], x[..., half : rope.rotary_dim], x[..., rope.rotary_dim :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def _visible(positions: torch.Tensor, keys: int, window: int | None) -> torch.Tensor:
    """bool [tokens, keys]: which keys each token attends to."""
    distance = positions[:, None] - torch.arange(keys)[None]
    return (distance >= 0) & (distance < window) if window is not None else distance >= 0


def _softcap(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    return x if cap is None else torch.tanh(x / cap) * cap


def _float32(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    tensor = checkpoint.read(name)
    values = tensor.dequantize() if isinstance(tensor, GroupedTensor) else tensor.astype(np.float32)
    return torch.from_numpy(np.ascontiguousarray(values))
