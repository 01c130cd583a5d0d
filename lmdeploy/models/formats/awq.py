"""AWQ, version `gemm`: 4 bits, one scale and one zero point per group of inputs.

qweight int32 [K, N / 8], qzeros int32 [K / group, N / 8]: bits 4 i .. 4 i + 3 of word c belong to output
channel 8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i];  scales [K / group, N];  w = (code - zero) * scale
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lmdeploy.models.formats.module import (
    FLOATS,
    Array,
    Groups,
    Matrix,
    Module,
    Options,
    channel_scales,
    pack,
)
from lmdeploy.quant.scheme import WeightScheme
from lmdeploy.quant.tensors import GroupedTensor, StoredMatrix, Tensor

_CHANNELS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class Awq:
    """Inputs per scale, -1: one group."""

    group_size: int
    name: str = "awq"
    notes: tuple[str, ...] = ()
    marks: tuple[str, ...] = ("qweight",)
    parts: tuple[str, ...] = ("qweight", "qzeros", "scales")
    order_part: str = ""

    def matrix(self, module: Module) -> Matrix:
        k, words = module.plane("qweight", ("I32",))
        groups = Groups.of(k, self.group_size)
        module.check("qzeros", ("I32",), (groups.stored, words))
        module.check("scales", FLOATS, (groups.stored, 8 * words))
        return Matrix((8 * words, k), "int4_zero", 4, groups.size)

    def read(self, module: Module, parts: Mapping[str, Array]) -> Tensor:
        codes = _channels(parts["qweight"])
        groups, scales, zeros = self._groups(codes.shape[1], parts)
        return GroupedTensor(4, groups.size, codes, scales, zeros=zeros)

    def stored(self, module: Module, parts: Mapping[str, Array]) -> StoredMatrix | None:
        words = parts["qweight"]
        groups, scales, zeros = self._groups(words.shape[0], parts)
        shape = 8 * words.shape[1], words.shape[0]
        return StoredMatrix("awq", words, shape, groups.size, scales=scales, zeros=zeros)

    def _groups(
        self, k: int, parts: Mapping[str, Array]
    ) -> tuple[Groups, npt.NDArray[np.floating], npt.NDArray[np.uint8]]:
        """Whole groups of k inputs, their scales and zero points [N, groups]."""
        groups = Groups.of(k, self.group_size)
        return (
            groups,
            groups.spread(channel_scales(parts["scales"])),
            groups.spread(_channels(parts["qzeros"])),
        )


def scheme(options: Options) -> Awq:
    """ModelError for a variant that is not read."""
    options.one_of("bits", (4,))
    options.one_of("version", ("gemm",), "gemm")
    options.one_of("zero_point", (True,), True)
    return Awq(options.group_size())


def _channels(words: Array) -> npt.NDArray[np.uint8]:
    """int32 [rows, N / 8] -> codes [N, rows]. The words are turned, not the codes: an eighth as many."""
    turned = np.ascontiguousarray(words.T).view(np.uint32)
    codes = np.empty((turned.shape[0], 8, turned.shape[1]), np.uint8)
    for i, channel in enumerate(_CHANNELS):
        codes[:, channel] = turned >> np.uint32(4 * i) & np.uint32(15)
    return codes.reshape(-1, turned.shape[1])


def encode(tensor: GroupedTensor, dtype: np.dtype[Any]) -> dict[str, Array]:
    """The tensors of one matrix of 4 bits with zero points up to 15."""
    assert tensor.zeros is not None and tensor.order is None
    return {
        "qweight": _words(tensor.codes.view(np.uint8)),
        "qzeros": _words(tensor.zeros),
        "scales": np.ascontiguousarray(tensor.scales.T.astype(dtype)),
    }


def config(scheme: WeightScheme, kept: list[str]) -> dict[str, Any]:
    """quantization_config; kept: modules that are not quantised."""
    return {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": scheme.group_size,
        "zero_point": True,
        "modules_to_not_convert": kept or None,
    }


def _words(codes: npt.NDArray[np.uint8]) -> Array:
    """Codes [N, rows] -> int32 [rows, N / 8]."""
    eights = codes.T.reshape(codes.shape[1], -1, 8)[..., list(_CHANNELS)]
    return pack(eights.reshape(codes.shape[1], -1), 4)
