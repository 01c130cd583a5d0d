"""GGUF's quantised blocks: from their bytes to integers with group scales, without a second rounding.

Layouts follow the public definition of the format. Blocks of 32: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0. Super-blocks
of 256 (the K kinds) keep a small integer scale for each group and one fp16 factor for all of them: a
product of up to 19 bits, so it is float32. Knows no file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lmdeploy.quant.tensors import GroupedTensor

TensorKind = Literal["float32", "float16", "bfloat16", "int4_zero", "int4_min", "int8", "int8_min"]
Bytes = npt.NDArray[np.uint8]

GROUP = 32  # values of a simple block, and of a group of Q4_K and Q5_K
SUPER = 256  # values of a super-block


@dataclass(frozen=True, slots=True)
class Layout:
    """One tensor kind: `block` values take `block_bytes` bytes; `kind` and `bits` are what reading yields.

    group: values per scale, 0 for float kinds. unpack: blocks [rows, blocks, block_bytes] to the tensor.
    """

    name: str
    block: int
    block_bytes: int
    kind: TensorKind
    bits: int
    group: int = 0
    unpack: Callable[[Bytes], GroupedTensor] | None = None


def _halves(blocks: Bytes, at: int) -> npt.NDArray[np.float16]:
    """The fp16 number at byte `at` of each block."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0]


def _nibbles(packed: Bytes) -> Bytes:
    """[..., n] bytes -> [..., 2 n] codes: all low nibbles, then all high ones."""
    half = packed.shape[-1]
    codes = np.empty((*packed.shape[:-1], 2 * half), np.uint8)
    np.bitwise_and(packed, 15, out=codes[..., :half])
    np.right_shift(packed, 4, out=codes[..., half:])
    return codes


def _flat(codes: Bytes) -> Bytes:
    return codes.reshape(codes.shape[0], -1)


def _q4_0(blocks: Bytes) -> GroupedTensor:
    scales = _halves(blocks, 0)
    zeros = np.full(scales.shape, 8, np.uint8)
    return GroupedTensor(4, GROUP, _flat(_nibbles(blocks[..., 2:])), scales, zeros=zeros)


def _q4_1(blocks: Bytes) -> GroupedTensor:
    mins = _halves(blocks, 2)
    return GroupedTensor(4, GROUP, _flat(_nibbles(blocks[..., 4:])), _halves(blocks, 0), mins=mins)


def _five_bits(high: Bytes, low: Bytes) -> Bytes:
    """Codes 0..31 of a block: bit i of the 4 bytes `high` is the fifth bit of value i."""
    codes = _nibbles(low)
    codes |= np.unpackbits(high, axis=-1, bitorder="little") << 4
    return codes


def _q5_0(blocks: Bytes) -> GroupedTensor:
    codes = _five_bits(blocks[..., 2:6], blocks[..., 6:]).view(np.int8)
    codes -= 16
    return GroupedTensor(8, GROUP, codes.reshape(len(codes), -1), _halves(blocks, 0))


def _q5_1(blocks: Bytes) -> GroupedTensor:
    codes = _five_bits(blocks[..., 4:8], blocks[..., 8:])
    return GroupedTensor(8, GROUP, _flat(codes), _halves(blocks, 0), mins=_halves(blocks, 2))


def _q8_0(blocks: Bytes) -> GroupedTensor:
    codes = np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
    return GroupedTensor(8, GROUP, codes.reshape(len(codes), -1), _halves(blocks, 0))


def _k_scales(blocks: Bytes) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Scales and minima [rows, groups] of Q4_K and Q5_K: fp16 factors in bytes 0..3, then eight 6-bit scales
    and eight 6-bit minima in 12 bytes."""
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scale = np.concatenate([first & 63, third & 15 | first >> 6 << 4], -1)
    least = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], -1)
    scales = _halves(blocks, 0).astype(np.float32)[..., None] * scale
    mins = _halves(blocks, 2).astype(np.float32)[..., None] * least
    return scales.reshape(len(blocks), -1), -mins.reshape(len(blocks), -1)


def _k_nibbles(packed: Bytes) -> Bytes:
    """128 bytes -> 256 codes: each 32 bytes hold one group in low and the next in high nibbles."""
    return _nibbles(packed.reshape(*packed.shape[:2], 4, GROUP)).reshape(*packed.shape[:2], 8, GROUP)


def _q4_k(blocks: Bytes) -> GroupedTensor:
    scales, mins = _k_scales(blocks)
    return GroupedTensor(4, GROUP, _flat(_k_nibbles(blocks[..., 16:])), scales, mins=mins)


def _q5_k(blocks: Bytes) -> GroupedTensor:
    """Bit j of byte i of the 32 bytes after the scales is the fifth bit of value i of group j."""
    scales, mins = _k_scales(blocks)
    codes = _k_nibbles(blocks[..., 48:])
    for group in range(8):
        codes[..., group, :] |= (blocks[..., 16:48] >> group & 1) << 4
    return GroupedTensor(8, GROUP, _flat(codes), scales, mins=mins)


def _q6_k(blocks: Bytes) -> GroupedTensor:
    """Each half of 128 values: 64 bytes of nibbles, low ones first, and 32 bytes with two more bits for the
    values i, i + 32, i + 64 and i + 96. Sixteen int8 scales, then the fp16 factor."""
    codes = _nibbles(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64))
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, GROUP)
    for quarter in range(4):
        codes[..., quarter * GROUP : (quarter + 1) * GROUP] |= (high >> 2 * quarter & 3) << 4
    signed = codes.view(np.int8)
    signed -= 32
    scale = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    scales = _halves(blocks, 208).astype(np.float32)[..., None] * scale
    return GroupedTensor(8, 16, signed.reshape(len(blocks), -1), scales.reshape(len(blocks), -1))


LAYOUTS: dict[int, Layout] = {
    0: Layout("F32", 1, 4, "float32", 32),
    1: Layout("F16", 1, 2, "float16", 16),
    2: Layout("Q4_0", GROUP, 18, "int4_zero", 4, GROUP, _q4_0),
    3: Layout("Q4_1", GROUP, 20, "int4_min", 4, GROUP, _q4_1),
    6: Layout("Q5_0", GROUP, 22, "int8", 8, GROUP, _q5_0),
    7: Layout("Q5_1", GROUP, 24, "int8_min", 8, GROUP, _q5_1),
    8: Layout("Q8_0", GROUP, 34, "int8", 8, GROUP, _q8_0),
    12: Layout("Q4_K", SUPER, 144, "int4_min", 4, GROUP, _q4_k),
    13: Layout("Q5_K", SUPER, 176, "int8_min", 8, GROUP, _q5_k),
    14: Layout("Q6_K", SUPER, 210, "int8", 8, 16, _q6_k),
    30: Layout("BF16", 1, 2, "bfloat16", 16),
}
_VALUES_AT_ONCE = 1 << 20  # so that intermediate values stay in the cache and take little memory

WIDE_SCALES = ("Q4_K", "Q5_K", "Q6_K")  # kinds whose scales need more than the 11 bits of a float16


def unpack(layout: Layout, blocks: Bytes) -> GroupedTensor:
    """The tensor in blocks uint8 [rows, blocks, block_bytes], some rows at a time."""
    assert layout.unpack is not None
    rows, step = len(blocks), max(1, _VALUES_AT_ONCE // (blocks.shape[1] * layout.block))
    whole = _like(layout.unpack(blocks[:step]), rows)
    for begin in range(0, rows, step):
        part = layout.unpack(blocks[begin : begin + step])
        for into, values in zip(_arrays(whole), _arrays(part), strict=True):
            into[begin : begin + step] = values
    return whole


def _arrays(tensor: GroupedTensor) -> list[npt.NDArray[Any]]:
    return [x for x in (tensor.codes, tensor.scales, tensor.zeros, tensor.mins) if x is not None]


def _like(tensor: GroupedTensor, rows: int) -> GroupedTensor:
    """Room for a tensor of the same form with `rows` rows."""

    def room(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.empty((rows, values.shape[1]), values.dtype)

    zeros = None if tensor.zeros is None else room(tensor.zeros)
    mins = None if tensor.mins is None else room(tensor.mins)
    return replace(tensor, codes=room(tensor.codes), scales=room(tensor.scales), zeros=zeros, mins=mins)
