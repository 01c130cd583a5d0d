"""compressed-tensors: `pack-quantized` integers of 4 bits, or of 8 bits symmetric; `float-quantized` is fp8.

weight_packed int32 [N, K bits / 32], inputs from the lowest bits on, codes offset by half their range
weight_scale [N, groups];  weight_zero_point int32 [N bits / 32, groups], offset alike (symmetric: absent)
weight_g_idx int32 [K] when groups are not consecutive inputs (act-order), see gptq.py
w = (code - zero) * scale
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lmdeploy.models.formats import fp8
from lmdeploy.models.formats.module import (
    FLOATS,
    Array,
    Matrix,
    Module,
    Options,
    Scheme,
    order_of,
    unpack,
)
from lmdeploy.quant.tensors import GroupedTensor, Tensor

_NAME = "compressed-tensors"


@dataclass(frozen=True, slots=True)
class PackQuantized:
    """Group sizes are told from the shapes."""

    bits: int
    symmetric: bool
    name: str = _NAME
    notes: tuple[str, ...] = ()
    marks: tuple[str, ...] = ("weight_packed",)
    parts: tuple[str, ...] = (
        *("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"),
        *fp8.UNUSED,
    )

    def matrix(self, module: Module) -> Matrix:
        n, words = module.plane("weight_packed", ("I32",))
        k = words * 32 // self.bits
        rows, groups = module.plane("weight_scale", FLOATS)
        if rows != n or k % groups:
            raise module.fail(
                "weight_scale", f"has shape {[rows, groups]}, which does not fit {[n, k]} weights"
            )
        if not self.symmetric:
            module.check("weight_zero_point", ("I32",), (-(-n * self.bits // 32), groups))
        ordered = "weight_g_idx" in module.headers and groups > 1
        if ordered:
            module.check("weight_g_idx", ("I32", "I64"), (k,))
        return Matrix((n, k), "int4_zero" if self.bits == 4 else "int8", self.bits, k // groups, ordered)

    def read(self, module: Module, parts: Mapping[str, Array]) -> Tensor:
        codes, scales = unpack(parts["weight_packed"], self.bits), parts["weight_scale"]
        if scales.dtype != np.float16:
            scales = scales.astype(np.float32)
        group, order = codes.shape[1] // scales.shape[1], None
        if "weight_g_idx" in parts and scales.shape[1] > 1:
            order = order_of(module, "weight_g_idx", parts["weight_g_idx"], group)
            codes = np.take(codes, order, axis=1)
        if self.bits == 8:
            return GroupedTensor(8, group, (codes ^ 0x80).view(np.int8), scales, order=order)
        zeros = np.full(scales.shape, 8, np.uint8)
        if not self.symmetric:
            zeros[:] = unpack(parts["weight_zero_point"].T, self.bits).T[: len(zeros)]
        return GroupedTensor(4, group, codes, scales, zeros=zeros, order=order)


def scheme(options: Options) -> Scheme:
    """ModelError for a variant that is not read."""
    form = options.one_of("format", ("pack-quantized", "float-quantized"))
    weights = _weights(options)
    if form == "float-quantized":
        weights.one_of("num_bits", (8,))
        weights.one_of("type", ("float",))
        return fp8.Fp8(_NAME, fp8.block_shape(weights, "block_structure"))
    weights.one_of("type", ("int",), "int")
    bits = weights.one_of("num_bits", (4, 8))
    weights.one_of("strategy", ("group", "channel"))
    symmetric = weights.one_of("symmetric", (True,) if bits == 8 else (True, False), True)
    return PackQuantized(bits, symmetric)


def _weights(options: Options) -> Options:
    """The `weights` of all config_groups, which must be the same."""
    groups = options.part("config_groups")
    if groups is None or not groups.values:
        raise options.fail("config_groups", "is missing or empty")
    found: list[Options] = []
    for name in groups.values:
        group = groups.part(name)
        weights = None if group is None else group.part("weights")
        if weights is None:
            raise groups.fail(name, "has no weights")
        found.append(weights)
    if any(weights.values != found[0].values for weights in found):
        raise options.fail("config_groups", "holds groups with different weights, which cannot be read")
    return found[0]
