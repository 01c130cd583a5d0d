"""The mathematics of a spec in plain torch, once: `Decoder`; and the oracle that executors are compared with.

The torch executor computes with `Decoder` too and brings its own attention over cache blocks. `Reference` is
readable before fast: float32, no cache blocks, one sequence at a time, attention over the whole sequence or
over the keys and values of an earlier call. The only module of `models` that imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from lmdeploy.errors import ModelError
from lmdeploy.models.checkpoint import Checkpoint
from lmdeploy.models.rope import inverse_frequencies
from lmdeploy.models.spec import Activation, AttentionSpec, FfnSpec, ModelSpec, RopeSpec
from lmdeploy.quant.tensors import GroupedTensor

Past = list[tuple[torch.Tensor, torch.Tensor]]  # per layer: keys, values [kv_heads, tokens, head_dim]
# (layer, its attention, q [tokens, heads, head_dim], k, v [tokens, kv_heads, head_dim]), all float32 and
# rotated, to the mixed values [tokens, heads * head_dim]
Attend = Callable[[int, AttentionSpec, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Turn = tuple[torch.Tensor, torch.Tensor]  # cosines and sines float32 [tokens, 1, rotary_dim / 2]

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}
_PIECE = 8192  # values; a multiple of every vector, and less than torch spreads over threads


class Decoder:
    """A model's arithmetic over weights by canonical name: matrices of any float type, float32 vectors.

    Activations are float32; matrices multiply in their own type. For rows of one fixed number a row's result
    on the CPU is the same bits whatever the other rows are (`each_value` and row-wise reductions see to it).
    """

    def __init__(self, spec: ModelSpec, weights: Mapping[str, torch.Tensor]) -> None:
        """ModelError when a layer is of a kind that is not computed here."""
        for kind in {layer.ffn.kind for layer in spec.layers} - {"gated"}:
            raise ModelError(f"a feed-forward block of kind {kind!r} is not supported (supported: gated)")
        self.spec, self._weights = spec, weights

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """float32 [tokens, hidden] after the last norm, for ids and positions int64 [tokens]."""
        x, turns = self.embed(tokens), self.turns(positions)
        for i in range(len(self.spec.layers)):
            x = self.layer(i, x, turns, attend)
        return self.last_norm(x)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, hidden], what the first layer reads."""
        return self._weights["embed.weight"][tokens].float() * self.spec.embedding_scale

    def turns(self, positions: torch.Tensor) -> dict[RopeSpec, Turn]:
        """Of every rope in the model, for positions int64 [tokens]."""
        return {rope: turn(positions, rope) for rope in {x.attention.rope for x in self.spec.layers} if rope}

    def layer(self, i: int, x: torch.Tensor, turns: Mapping[RopeSpec, Turn], attend: Attend) -> torch.Tensor:
        """What layer i makes of its input [tokens, hidden]."""
        scale = self.spec.layers[i].residual_scale
        x = x + self.attention_block(i, x, turns, attend) * scale
        return x + self.ffn_block(i, x) * scale

    def attention_block(
        self, i: int, x: torch.Tensor, turns: Mapping[RopeSpec, Turn], attend: Attend
    ) -> torch.Tensor:
        """What attention of layer i adds to x, before `residual_scale`."""
        layer, name = self.spec.layers[i], f"layers.{i}"
        h = self._norm(f"{name}.attn_norm", x) if layer.pre_norm else x
        h = self._attention(i, layer.attention, h, turns, attend)
        return self._norm(f"{name}.attn_post_norm", h) if layer.post_norm else h

    def ffn_block(self, i: int, x: torch.Tensor) -> torch.Tensor:
        """What the feed-forward block of layer i adds to x, before `residual_scale`."""
        layer, name = self.spec.layers[i], f"layers.{i}"
        h = self._norm(f"{name}.ffn_norm", x) if layer.pre_norm else x
        h = self._ffn(f"{name}.ffn", layer.ffn, h)
        return self._norm(f"{name}.ffn_post_norm", h) if layer.post_norm else h

    def last_norm(self, x: torch.Tensor) -> torch.Tensor:
        """Of what the last layer put out."""
        return self._norm("norm", x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocab] of rows that `last_norm` returned."""
        head = "embed" if self.spec.tie_embeddings else "lm_head"
        return _softcap(self.linear(head, hidden) * self.spec.logit_scale, self.spec.logit_softcap)

    def _attention(
        self, i: int, a: AttentionSpec, x: torch.Tensor, turns: Mapping[RopeSpec, Turn], attend: Attend
    ) -> torch.Tensor:
        name = f"layers.{i}.attn"
        q, k, v = (self.linear(f"{name}.{part}_proj", x) for part in "qkv")
        if a.qk_norm_across_heads:
            q, k = self._norm(f"{name}.q_norm", q), self._norm(f"{name}.k_norm", k)
        q = q.view(len(x), a.num_heads, a.head_dim)
        k, v = (y.view(len(x), a.num_kv_heads, a.head_dim) for y in (k, v))
        if a.qk_norm and not a.qk_norm_across_heads:
            q, k = self._norm(f"{name}.q_norm", q), self._norm(f"{name}.k_norm", k)
        if a.rope is not None:
            q, k = rotate(q, turns[a.rope]), rotate(k, turns[a.rope])
        return self.linear(f"{name}.o_proj", attend(i, a, q, k, v))

    def _ffn(self, name: str, ffn: FfnSpec, x: torch.Tensor) -> torch.Tensor:
        gate = self.activate(ffn.activation, self.linear(f"{name}.gate_proj", x))
        return self.linear(f"{name}.down_proj", gate * self.linear(f"{name}.up_proj", x))

    def activate(self, kind: Activation, x: torch.Tensor) -> torch.Tensor:
        """The activation of a gated block, of every value."""
        return each_value(ACTIVATIONS[kind], x)

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, in] times the matrix of that name, plus its bias."""
        weight, bias = self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias")
        y = functional.linear(x.to(weight.dtype), weight).float()
        return y if bias is None else y + bias

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        spec = self.spec.norm
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + spec.eps)
        return scaled * (self._weights[f"{name}.weight"] + spec.offset)


class Reference:
    """Holds all weights as float32 tensors."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec | None = None) -> None:
        """spec: in place of the checkpoint's, when it is meant for a length (`ModelSpec.for_length`)."""
        self.spec: ModelSpec = spec or checkpoint.spec
        self._decoder = Decoder(self.spec, {n: _float32(checkpoint, n) for n in checkpoint.names()})

    def logits(self, ids: npt.ArrayLike, past: Past | None = None) -> npt.NDArray[np.float32]:
        """Logits float32 [len(ids), vocab] of the tokens `ids` that follow those in `past`.

        past: a list to keep between calls (start with []); it is extended in place. None: a whole sequence.
        """
        tokens = torch.as_tensor(np.asarray(ids, np.int64))
        past = [] if past is None else past
        start = past[0][0].shape[1] if past else 0
        positions = torch.arange(start, start + len(tokens))

        def attend(
            i: int, a: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
        ) -> torch.Tensor:
            keys, values = k.transpose(0, 1), v.transpose(0, 1)
            if i < len(past):
                keys, values = torch.cat([past[i][0], keys], 1), torch.cat([past[i][1], values], 1)
            past[i : i + 1] = [(keys, values)]
            return _attend(a, q, keys, values, positions)

        with torch.no_grad():
            logits = self._decoder.logits(self._decoder.hidden(tokens, positions, attend))
        return np.asarray(logits.numpy(), np.float32)


def _attend(
    a: AttentionSpec, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """q [tokens, heads, head_dim] over keys and values [kv_heads, all tokens, head_dim]."""
    group = a.num_heads // a.num_kv_heads
    scores = masked_scores(
        q.transpose(0, 1),
        keys.repeat_interleave(group, 0),
        a,
        visible(positions, torch.arange(keys.shape[1]), a.window),
    )
    mixed = torch.softmax(scores, -1) @ values.repeat_interleave(group, 0)
    return mixed.transpose(0, 1).reshape(len(q), -1)


def masked_scores(q: torch.Tensor, keys: torch.Tensor, a: AttentionSpec, seen: torch.Tensor) -> torch.Tensor:
    """Scores [heads, tokens, keys] before the softmax; -inf where `seen` [tokens, keys] is False."""
    scores = _softcap(q @ keys.transpose(1, 2) * a.scale, a.softcap)
    return scores.masked_fill(~seen, -torch.inf)


def visible(positions: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
    """bool [tokens, keys]: which key positions each token attends to."""
    distance = positions[:, None] - keys[None]
    return (distance >= 0) & (distance < window) if window is not None else distance >= 0


def turn(positions: torch.Tensor, rope: RopeSpec) -> Turn:
    """Cosines and sines of position x frequency."""
    angles = positions[:, None].double() * torch.from_numpy(inverse_frequencies(rope)).to(positions.device)
    scaled = (each_value(f, angles) * rope.attention_factor for f in (torch.cos, torch.sin))
    cos, sin = (values.float()[:, None] for values in scaled)
    return cos, sin


def rotate(x: torch.Tensor, turn: Turn) -> torch.Tensor:
    """x [tokens, heads, head_dim]: pairs (d, d + rotary_dim / 2) turned, the rest as it was."""
    cos, sin = turn
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def each_value(f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """f of every value, the same bits wherever the value stands.

    On the CPU torch computes what remains after the last full vector by another formula, so full pieces are
    handed to it.
    """
    if x.device.type != "cpu":
        return f(x)
    flat = functional.pad(x.reshape(-1), (0, -x.numel() % _PIECE))
    return torch.cat([f(piece) for piece in flat.split(_PIECE)])[: x.numel()].view(x.shape)


def _softcap(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    return x if cap is None else each_value(torch.tanh, x / cap) * cap


def _float32(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    tensor = checkpoint.read(name)
    values = tensor.dequantize() if isinstance(tensor, GroupedTensor) else tensor.astype(np.float32)
    return torch.from_numpy(np.ascontiguousarray(values))
