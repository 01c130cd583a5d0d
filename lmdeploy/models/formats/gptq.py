"""GPTQ: 4 or 8 bits with a zero point per group of inputs.

    qweight int32 [K bits / 32, N], inputs from the lowest bits on;  scales [groups, N]
    qzeros int32 [groups, N bits / 32], channels from the lowest bits on; checkpoint_format `gptq` (version 1)
    stores zero - 1, `gptq_v2` stores the zero;  g_idx int32 [K]: the group of each input
    w = (code - zero) * scale[group]

With desc_act the groups are not consecutive inputs (act-order). Sorted by group they are: the columns of
codes are put in that order, which is given with the tensor, and no value changes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lmdeploy.models.formats.gguf_blocks import TensorKind
from lmdeploy.models.formats.module import (
    FLOATS,
    ROUNDED_ZEROS,
    Array,
    ByModule,
    Groups,
    Matrix,
    Module,
    Options,
    Scheme,
    channel_scales,
    order_of,
    pack,
    unpack,
    unsigned,
    with_zeros,
)
from lmdeploy.quant.scheme import WeightScheme
from lmdeploy.quant.tensors import GroupedTensor, StoredMatrix, Tensor


@dataclass(frozen=True, slots=True)
class Gptq:
    """zero_offset: what is added to a stored zero point. symmetric: of 8 bits, all zero points are 128."""

    bits: int
    symmetric: bool
    group_size: int
    desc_act: bool
    zero_offset: int
    name: str = "gptq"
    marks: tuple[str, ...] = ("qweight",)
    parts: tuple[str, ...] = ("qweight", "qzeros", "scales", "g_idx")
    order_part: str = "g_idx"

    @property
    def notes(self) -> tuple[str, ...]:
        return (ROUNDED_ZEROS,) if self.bits == 8 and not self.symmetric else ()

    def matrix(self, module: Module) -> Matrix:
        words, n = module.plane("qweight", ("I32",))
        per_word = 32 // self.bits
        k = words * per_word
        groups = Groups.of(k, self.group_size)
        module.check("qzeros", ("I32",), (groups.stored, n // per_word))
        module.check("scales", FLOATS, (groups.stored, n))
        if self.desc_act or "g_idx" in module.headers:
            module.check("g_idx", ("I32", "I64"), (k,))
        kind: TensorKind = "int4_zero" if self.bits == 4 else "int8" if self.symmetric else "int8_min"
        return Matrix((n, k), kind, self.bits, groups.size, self.desc_act and groups.stored > 1)

    def read(self, module: Module, parts: Mapping[str, Array]) -> Tensor:
        codes = unpack(parts["qweight"].T, self.bits)
        groups = Groups.of(codes.shape[1], self.group_size)
        scales, zeros = (
            groups.spread(channel_scales(parts["scales"])),
            groups.spread(self._zeros(module, parts)),
        )
        group, order = groups.size, self._order(module, parts, groups)
        if order is not None:
            codes = np.take(codes, order, axis=1)
        if self.bits == 4:
            return GroupedTensor(4, group, codes, scales, zeros=zeros, order=order)
        if not self.symmetric:
            return with_zeros(codes, zeros, scales, order)
        return GroupedTensor(8, group, (codes ^ 0x80).view(np.int8), scales, order=order)

    def stored(self, module: Module, parts: Mapping[str, Array]) -> StoredMatrix | None:
        words, k = parts["qweight"], parts["qweight"].shape[0] * 32 // self.bits
        groups = Groups.of(k, self.group_size)
        scales = groups.spread(channel_scales(parts["scales"]))
        if self._order(module, parts, groups) is not None or (self.bits == 8 and not self.symmetric):
            return None
        zeros, shape, group = groups.spread(self._zeros(module, parts)), (words.shape[1], k), groups.size
        if self.bits == 8:
            return StoredMatrix("gptq8", words, shape, group, scales=scales)
        return StoredMatrix("gptq4", words, shape, group, scales=scales, zeros=zeros)

    def _zeros(self, module: Module, parts: Mapping[str, Array]) -> npt.NDArray[np.uint8]:
        """[N, groups]; of 8 bits that are symmetric, all must be 128."""
        zeros = np.array(unpack(parts["qzeros"], self.bits).T, order="C")
        zeros += np.uint8(self.zero_offset)  # 1 to 16; 8 bits wrap
        if self.bits == 8 and self.symmetric and (zeros != 128).any():
            raise module.fail("qzeros", "holds zero points other than 128, although sym is true")
        if self.bits == 4 and self.symmetric and (zeros == zeros[0, 0]).all():
            _check_version(module, int(zeros[0, 0]))
        return zeros

    def _order(
        self, module: Module, parts: Mapping[str, Array], groups: Groups
    ) -> npt.NDArray[np.int32] | None:
        """In which the inputs lie when sorted by group, where that is not as they are."""
        if "g_idx" not in parts or groups.stored == 1:
            return None
        order = order_of(module, "g_idx", parts["g_idx"], groups.stored_size)
        if self.desc_act:
            return order
        if not np.array_equal(order, np.arange(groups.inputs)):
            raise module.fail("g_idx", "is not in order, although desc_act is false")
        return None


def _check_version(module: Module, zero: int) -> None:
    """The one zero point of a matrix that is said to be symmetric. One off, the two versions are mixed up."""
    if zero in (7, 9):
        meant = "gptq" if zero == 7 else "gptq_v2"
        raise module.fail(
            "qzeros",
            f"holds only zero points of {zero}, where sym means 8: the tensors look like checkpoint_format"
            f" {meant!r}, which quantization_config does not say",
        )


def scheme(options: Options) -> Scheme:
    """ModelError for a variant that is not read. `dynamic` gives modules options of their own: a pattern of
    their names, after `+:`; after `-:` one of those that are not quantised, which the tensors show too."""
    whole, dynamic = _scheme(options), options.part("dynamic")
    if dynamic is None:
        return whole
    groups: list[tuple[tuple[str, ...], Scheme]] = []
    for pattern in dynamic.values:
        own = dynamic.part(pattern)
        if own is None:
            raise dynamic.fail(pattern, "is no object")
        if not pattern.startswith("-:"):
            merged = Options({**options.values, **own.values}, own.source, own.prefix)
            groups.append(((f"re:{pattern.removeprefix('+:')}",), _scheme(merged)))
    return ByModule((*groups, (("Linear",), whole)), whole.name) if groups else whole


def _scheme(options: Options) -> Gptq:
    bits = options.one_of("bits", (4, 8))
    symmetric = options.one_of("sym", (True, False), True)
    form = options.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    options.one_of("is_marlin_format", (False,), False)
    desc_act = options.one_of("desc_act", (True, False), False)
    return Gptq(bits, symmetric, options.group_size(-1), desc_act, 0 if form == "gptq_v2" else 1)


def encode(tensor: GroupedTensor, dtype: np.dtype[Any], version: int) -> dict[str, Array]:
    """The tensors of one matrix. With an order of its inputs: codes in their own places, `g_idx` says which
    group each belongs to."""
    codes, zeros = unsigned(tensor)
    group_of = np.arange(codes.shape[1], dtype=np.int32) // tensor.group_size
    if tensor.order is not None:
        placed, groups = np.empty_like(codes), np.empty_like(group_of)
        placed[:, tensor.order], groups[tensor.order] = codes, group_of
        codes, group_of = placed, groups
    stored = zeros - np.uint8(1) if version == 1 else zeros  # below 0 wraps, as readers undo it
    if tensor.bits == 4:
        stored = stored & np.uint8(15)
    return {
        "qweight": np.ascontiguousarray(pack(codes, tensor.bits).T),
        "qzeros": pack(stored.T, tensor.bits),
        "scales": np.ascontiguousarray(tensor.scales.T.astype(dtype)),
        "g_idx": group_of,
    }


def config(groups: Mapping[WeightScheme, list[str]], kept: list[str], version: int) -> dict[str, Any]:
    """quantization_config for modules by scheme: the first stands for every module that `dynamic` does not
    name; kept: modules that are not quantised."""
    (scheme, _), *others = groups.items()
    dynamic: dict[str, Any] = {f"-:{_named(module)}": {} for module in kept}
    dynamic |= {f"+:{_named(module)}": _options(other) for other, modules in others for module in modules}
    return {
        "quant_method": "gptq",
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
        **_options(scheme),
        "desc_act": scheme.ordered,
        **({"dynamic": dynamic} if dynamic else {}),
    }


def _options(scheme: WeightScheme) -> dict[str, Any]:
    return {"bits": scheme.bits, "group_size": scheme.group_size, "sym": scheme.symmetric}


def _named(module: str) -> str:
    return f"^{re.escape(module)}$"
