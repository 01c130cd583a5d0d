"""File formats that quantised matrices are written in: what each can hold, its tensors, its description.

The layouts themselves stand beside their readers. A writer knows matrices and modules by the
file's own names; it knows no family, no algorithm and no directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from lmdeploy.errors import ConfigError
from lmdeploy.models.formats import awq, compressed_tensors, gptq
from lmdeploy.models.formats.module import Array
from lmdeploy.quant.scheme import WeightScheme
from lmdeploy.quant.tensors import GroupedTensor

_NEIGHBOURS = "is written with groups of neighbours here: use gptq or gptq_v2 for groups in another order"
Schemes = Mapping[str, WeightScheme | None]  # by module as the files call it; None: not quantised


class Writer(Protocol):
    """One format."""

    @property
    def name(self) -> str: ...
    @property
    def mixed(self) -> bool:
        """Whether matrices of one model may have different schemes."""

    @property
    def outside(self) -> bool:
        """Whether matrices in no layer can be written: embedding and output matrix."""

    def refusal(self, scheme: WeightScheme, shape: tuple[int, int]) -> str | None:
        """Why a matrix [N, K] cannot be written so, None when it can."""

    def encode(self, tensor: GroupedTensor, symmetric: bool, dtype: np.dtype[Any]) -> dict[str, Array]:
        """Last names and values of the tensors that stand for one matrix. dtype: of scales."""

    def config(self, schemes: Schemes) -> dict[str, Any]:
        """quantization_config of a model with these modules."""


@dataclass(frozen=True, slots=True)
class AwqWriter:
    """AWQ `gemm`; symmetric schemes have a zero point of 8 everywhere."""

    name: str = "awq"
    mixed: bool = False
    outside: bool = False

    def refusal(self, scheme: WeightScheme, shape: tuple[int, int]) -> str | None:
        if scheme.bits != 4:
            return f"holds 4 bits, not {scheme.bits}"
        if scheme.ordered:
            return _NEIGHBOURS
        return None if shape[0] % 8 == 0 else f"packs 8 output channels in a word, and there are {shape[0]}"

    def encode(self, tensor: GroupedTensor, symmetric: bool, dtype: np.dtype[Any]) -> dict[str, Array]:
        return awq.encode(tensor, dtype)

    def config(self, schemes: Schemes) -> dict[str, Any]:
        return awq.config(only_scheme(schemes), kept(schemes))


@dataclass(frozen=True, slots=True)
class GptqWriter:
    """GPTQ; version 1 stores zero points less one, version 2 as they are.

    Readers differ in what a zero point of 0 means in version 1 (0 or 16), so it takes schemes that have none.
    """

    version: int
    mixed: bool = True
    outside: bool = False

    @property
    def name(self) -> str:
        return "gptq" if self.version == 1 else "gptq_v2"

    def refusal(self, scheme: WeightScheme, shape: tuple[int, int]) -> str | None:
        if self.version == 1 and not scheme.symmetric and scheme.least_zero == 0:
            return "has no zero point of 0: use gptq_v2, or a scheme that has none"
        per_word = 32 // scheme.bits
        for count, what in zip(shape, ("output channels", "inputs"), strict=True):
            if count % per_word:
                return f"packs {per_word} {what} in a word, and there are {count}"
        return None

    def encode(self, tensor: GroupedTensor, symmetric: bool, dtype: np.dtype[Any]) -> dict[str, Array]:
        return gptq.encode(tensor, dtype, self.version)

    def config(self, schemes: Schemes) -> dict[str, Any]:
        return gptq.config(by_scheme(schemes), kept(schemes), self.version)


@dataclass(frozen=True, slots=True)
class PackedWriter:
    """compressed-tensors `pack-quantized`: 4 and 8 bits side by side."""

    name: str = "compressed-tensors"
    mixed: bool = True
    outside: bool = True

    def refusal(self, scheme: WeightScheme, shape: tuple[int, int]) -> str | None:
        per_word = 32 // scheme.bits
        if scheme.ordered:
            return _NEIGHBOURS
        return None if shape[1] % per_word == 0 else f"packs {per_word} inputs in a word, not {shape[1]}"

    def encode(self, tensor: GroupedTensor, symmetric: bool, dtype: np.dtype[Any]) -> dict[str, Array]:
        return compressed_tensors.encode_packed(tensor, symmetric, dtype)

    def config(self, schemes: Schemes) -> dict[str, Any]:
        return compressed_tensors.packed_config(by_scheme(schemes), kept(schemes))


@dataclass(frozen=True, slots=True)
class BytesWriter:
    """compressed-tensors `int-quantized`: W8A8, activations rounded token by token by engines that do so."""

    name: str = "w8a8"
    mixed: bool = False
    outside: bool = False

    def refusal(self, scheme: WeightScheme, shape: tuple[int, int]) -> str | None:
        if scheme.ordered:
            return _NEIGHBOURS
        return None if scheme.bits == 8 and scheme.symmetric else "holds 8 symmetric bits only"

    def encode(self, tensor: GroupedTensor, symmetric: bool, dtype: np.dtype[Any]) -> dict[str, Array]:
        return compressed_tensors.encode_bytes(tensor, dtype)

    def config(self, schemes: Schemes) -> dict[str, Any]:
        return compressed_tensors.bytes_config(only_scheme(schemes), kept(schemes))


WRITERS: dict[str, Writer] = {
    writer.name: writer
    for writer in (AwqWriter(), GptqWriter(1), GptqWriter(2), PackedWriter(), BytesWriter())
}


def kept(schemes: Schemes) -> list[str]:
    """Modules that are not quantised."""
    return [name for name, scheme in schemes.items() if scheme is None]


def by_scheme(schemes: Schemes) -> dict[WeightScheme, list[str]]:
    """Modules of each scheme, that of most modules first."""
    found: dict[WeightScheme, list[str]] = {}
    for name, scheme in schemes.items():
        if scheme is not None:
            found.setdefault(scheme, []).append(name)
    return dict(sorted(found.items(), key=lambda one: -len(one[1])))


def only_scheme(schemes: Schemes) -> WeightScheme:
    """ConfigError when there are several."""
    found = list(by_scheme(schemes))
    if len(found) != 1:
        raise ConfigError(
            f"{len(found)} kinds of quantised matrices in one model need the format compressed-tensors"
        )
    return found[0]
