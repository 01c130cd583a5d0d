"""Keys and values in cache blocks as 8-bit or 4-bit codes: the number format of the native engine.

A token's head is turned by a fixed orthogonal matrix, then rounded to `scale * code + offset` with one
bfloat16 scale and offset: from that token alone, so that it does not matter what is computed with it.
The turn spreads what one strong channel holds over the head; products of turned vectors are those of the
vectors.
"""

from __future__ import annotations

import torch

from lmdeploy.models.spec import ModelSpec


class RoundedCache:
    """Per layer codes uint8 [2, kv_heads, num_blocks, block_size, head_dim * bits / 8] of keys and values,
    and factors bfloat16 [2, 2, kv_heads, num_blocks, block_size]: scales and offsets."""

    def __init__(
        self, spec: ModelSpec, num_blocks: int, block_size: int, bits: int, device: torch.device
    ) -> None:
        self.block_size, self._bits = block_size, bits
        self.codes, self.factors = [], []
        for layer in spec.layers:
            a = layer.attention
            places = (a.num_kv_heads, num_blocks, block_size)
            codes = torch.zeros((2, *places, a.head_dim * bits // 8), dtype=torch.uint8, device=device)
            self.codes.append(codes)
            self.factors.append(torch.zeros((2, 2, *places), dtype=torch.bfloat16, device=device))

    def tensors(self) -> list[torch.Tensor]:
        """Everything that is kept."""
        return [*self.codes, *self.factors]

    def turn(self, q: torch.Tensor) -> torch.Tensor:
        """Queries as they meet the keys that `read` returns."""
        return rotate(q)

    def turn_back(self, mixed: torch.Tensor) -> torch.Tensor:
        """Mixes of the values that `read` returns, as the model knows them."""
        return rotate_back(mixed)

    def write(
        self, layer: int, blocks: torch.Tensor, offsets: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """k, v float32 [tokens, kv_heads, head_dim] to places int64 [tokens]."""
        for i, new in enumerate((k, v)):
            codes, factors = round_heads(rotate(new.transpose(0, 1)), self._bits)
            self.codes[layer][i][:, blocks, offsets] = pack(codes, self._bits)
            self.factors[layer][i][:, :, blocks, offsets] = factors

    def read(
        self, layer: int, blocks: torch.Tensor, count: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `count` tokens in `blocks`, turned, as float32 [kv_heads, width, head_dim], zeros after
        them."""
        return self._gather(layer, 0, blocks, count, width), self._gather(layer, 1, blocks, count, width)

    def _gather(self, layer: int, which: int, blocks: torch.Tensor, count: int, width: int) -> torch.Tensor:
        cache, factors = self.codes[layer][which], self.factors[layer][which][:, :, blocks]
        heads, _, _, size = cache.shape
        scale, offset = factors.view(2, heads, -1, 1)[:, :, :count].float()
        codes = unpack(cache[:, blocks].view(heads, -1, size)[:, :count], self._bits)
        result = torch.zeros(heads, width, codes.shape[-1], dtype=torch.float32, device=cache.device)
        torch.mul(codes, scale, out=result[:, :count])
        result[:, :count] += offset
        return result


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Signs, then an orthogonal Hadamard matrix on blocks of the largest power of two that divides the last
    dimension. Additions only: each value's bits depend on its own head."""
    return _hadamard(x * _signs(x))


def rotate_back(x: torch.Tensor) -> torch.Tensor:
    """The inverse of `rotate`."""
    return _hadamard(x) * _signs(x)


def _hadamard(x: torch.Tensor) -> torch.Tensor:
    shape, step = x.shape, 1
    while step < _block(shape[-1]):
        pairs = x.reshape(*shape[:-1], -1, 2, step)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((a + b, a - b), -2).view(shape)
        step *= 2
    return x


def _block(head_dim: int) -> int:
    return head_dim & -head_dim


def _signs(x: torch.Tensor) -> torch.Tensor:
    """+-1 over the root of the block: the inner-product bent function of six bits, whose Hadamard transform
    is flat, so that an equal shift of all channels is spread like one strong channel."""
    head_dim = x.shape[-1]
    signs = [1.0 - 2 * (((d >> 3) & d & 7).bit_count() % 2) for d in range(head_dim)]
    return torch.tensor(signs, device=x.device) / _block(head_dim) ** 0.5


def round_heads(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes float32 like x [..., head_dim], and bfloat16 [2, ...]: scales and offsets.

    What is not finite makes its head NaN.
    """
    offset = _bfloat16(x.amin(-1, keepdim=True), up=False)
    widest = x.amax(-1, keepdim=True) - offset
    scale = _bfloat16(widest / (2**bits - 1), up=True)
    scale[~torch.isfinite(widest)] = torch.nan
    scale[widest < 1e-30] = 0
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    offset[scale.isnan()] = torch.nan
    codes = torch.nan_to_num((x - offset) * inverse).round().clamp(0, 2**bits - 1)
    return codes, torch.stack((scale, offset))[..., 0].bfloat16()


def _bfloat16(x: torch.Tensor, up: bool) -> torch.Tensor:
    """The nearest bfloat16 that is not less (not more) than x, as float32."""
    away = (x < 0) ^ up  # from zero
    bits = x.contiguous().view(torch.int32)
    return ((bits + torch.where(away, 0xFFFF, 0).to(torch.int32)) & -0x10000).view(torch.float32)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8; with 4 bits the second half of the head lies in the upper nibbles of the first."""
    whole = codes.to(torch.uint8)
    if bits == 8:
        return whole
    low, high = whole.chunk(2, -1)
    return low | high << 4


def unpack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    return codes if bits == 8 else torch.cat((codes & 15, codes >> 4), -1)
