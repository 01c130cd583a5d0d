"""compressed-tensors: integers of 4 or 8 bits, packed or as bytes; `float-quantized` is fp8.

pack-quantized:
    weight_packed int32 [N, K bits / 32], inputs from the lowest bits on, codes offset by half their range
    weight_scale [N, groups];  weight_zero_point int32 [N bits / 32, groups], offset alike (symmetric: absent)
    weight_g_idx int32 [K] when groups are not consecutive inputs (act-order), see gptq.py
int-quantized and naive-quantized (W8A8):
    weight int8 [N, K];  weight_scale [N, groups], [N], or one number;  weight_zero_point int8 alike
w = (code - zero) * scale. Scales of activations are not used: activations keep the engine's own precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lmdeploy.models.fields import shown
from lmdeploy.models.formats import fp8
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
    order_of,
    pack,
    unpack,
    unsigned,
    with_zeros,
)
from lmdeploy.quant.scheme import WHOLE_ROW, InputRounding, WeightScheme
from lmdeploy.quant.tensors import GroupedTensor, StoredMatrix, Tensor

_NAME = "compressed-tensors"
_BY_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_HEAD = "lm_head"  # as most readers call the output matrix


@dataclass(frozen=True, slots=True)
class PackQuantized:
    """group_size: inputs per scale, -1: one group, None: as the shapes say, in whole groups."""

    bits: int
    symmetric: bool
    group_size: int | None
    inputs: InputRounding = "none"
    name: str = _NAME
    marks: tuple[str, ...] = ("weight_packed",)
    parts: tuple[str, ...] = (
        *("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"),
        *fp8.UNUSED,
    )
    order_part: str = "weight_g_idx"

    @property
    def notes(self) -> tuple[str, ...]:
        return (*_finer(self.inputs), *((ROUNDED_ZEROS,) if self.bits == 8 and not self.symmetric else ()))

    def matrix(self, module: Module) -> Matrix:
        n, words = module.plane("weight_packed", ("I32",))
        k = words * 32 // self.bits
        rows, count = module.plane("weight_scale", FLOATS)
        if self.group_size is None and k % count:
            raise module.fail(
                "weight_scale", f"has shape {[rows, count]}, which does not fit {[n, k]} weights"
            )
        groups = self._groups(k, count)
        module.check("weight_scale", FLOATS, (n, groups.stored))
        if not self.symmetric or "weight_zero_point" in module.headers:
            module.check("weight_zero_point", ("I32",), (-(-n * self.bits // 32), groups.stored))
        ordered = "weight_g_idx" in module.headers and groups.stored > 1
        if ordered:
            module.check("weight_g_idx", ("I32", "I64"), (k,))
        kind: TensorKind = "int4_zero" if self.bits == 4 else "int8" if self.symmetric else "int8_min"
        return Matrix((n, k), kind, self.bits, groups.size, ordered, self.inputs)

    def read(self, module: Module, parts: Mapping[str, Array]) -> Tensor:
        codes, order = unpack(parts["weight_packed"], self.bits), None
        groups = self._groups(codes.shape[1], parts["weight_scale"].shape[1])
        if "weight_g_idx" in parts and groups.stored > 1:
            order = order_of(module, "weight_g_idx", parts["weight_g_idx"], groups.stored_size)
            codes = np.take(codes, order, axis=1)
        scales, zeros, group = *self._grid(module, parts, groups), groups.size
        if self.bits == 8 and self.symmetric:
            return GroupedTensor(8, group, (codes ^ 0x80).view(np.int8), scales, order=order)
        if self.bits == 8:
            return with_zeros(codes, zeros, scales, order)
        return GroupedTensor(4, group, codes, scales, zeros=zeros, order=order)

    def stored(self, module: Module, parts: Mapping[str, Array]) -> StoredMatrix | None:
        words = parts["weight_packed"]
        data, shape = words.view(np.uint8), (words.shape[0], words.shape[1] * 32 // self.bits)
        groups = self._groups(shape[1], parts["weight_scale"].shape[1])
        if ("weight_g_idx" in parts and groups.stored > 1) or (self.bits == 8 and not self.symmetric):
            return None
        scales, zeros, group = *self._grid(module, parts, groups), groups.size
        if self.bits == 8:
            return StoredMatrix("words8", data, shape, group, scales=scales)
        return StoredMatrix("words4", data, shape, group, scales=scales, zeros=zeros)

    def _groups(self, k: int, count: int) -> Groups:
        """Of k inputs with `count` scales."""
        return Groups.of(k, k // count if self.group_size is None else self.group_size)

    def _grid(
        self, module: Module, parts: Mapping[str, Array], groups: Groups
    ) -> tuple[npt.NDArray[np.floating], npt.NDArray[np.uint8]]:
        """Scales and zero points of whole groups."""
        scales, middle = _narrow(parts["weight_scale"]), 1 << self.bits - 1
        zeros = np.full(scales.shape, middle, np.uint8)
        if "weight_zero_point" in parts:
            zeros[:] = unpack(parts["weight_zero_point"].T, self.bits).T[: len(zeros)]
            _check_symmetric(module, self.symmetric, zeros, middle)
        return groups.spread(scales), groups.spread(zeros)


def _finer(inputs: InputRounding) -> tuple[str, ...]:
    if inputs == "none":
        return ()
    return ("activations keep the engine's precision where the file means them to be rounded",)


def _narrow(scales: Array) -> npt.NDArray[np.floating]:
    """float16 as it is, other types as float32."""
    return scales if scales.dtype == np.float16 else scales.astype(np.float32)


@dataclass(frozen=True, slots=True)
class Bytes:
    """Weights as int8, a scale per group, channel or matrix: the first of `marks`."""

    symmetric: bool
    inputs: InputRounding = "none"
    name: str = _NAME
    marks: tuple[str, ...] = ("weight_scale",)
    parts: tuple[str, ...] = ("weight", "weight_scale", "weight_zero_point", *fp8.UNUSED, "input_zero_point")
    order_part: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        return (*_finer(self.inputs), *(() if self.symmetric else (ROUNDED_ZEROS,)))

    def matrix(self, module: Module) -> Matrix:
        n, k = module.plane("weight", ("I8",))
        mark = self.marks[0]
        module.check(mark, FLOATS)
        shape = module.headers[mark].shape
        groups = shape[1] if len(shape) == 2 else 1
        if shape not in ((), (1,), (1, 1), (n,), (n, groups)) or not groups or k % groups:
            raise module.fail(mark, f"has shape {list(shape)}, which does not fit {[n, k]} weights")
        if not self.symmetric or "weight_zero_point" in module.headers:
            module.check("weight_zero_point", ("I8",), shape)
        kind: TensorKind = "int8" if self.symmetric else "int8_min"
        return Matrix((n, k), kind, 8, k // groups, inputs=self.inputs)

    def read(self, module: Module, parts: Mapping[str, Array]) -> Tensor:
        codes = parts["weight"]
        scales = self._scales(module, parts, len(codes))
        if self.symmetric:
            return GroupedTensor(8, codes.shape[1] // scales.shape[1], codes, scales)
        zeros = self._each(parts["weight_zero_point"], len(codes))
        return with_zeros(_unsigned(codes), _unsigned(zeros), scales)

    def stored(self, module: Module, parts: Mapping[str, Array]) -> StoredMatrix | None:
        codes = parts["weight"]
        n, k = codes.shape
        scales = self._scales(module, parts, n)
        if not self.symmetric or k % 4:
            return None
        return StoredMatrix("int8", codes.view(np.uint8), (n, k), k // scales.shape[1], scales=scales)

    def _scales(self, module: Module, parts: Mapping[str, Array], n: int) -> npt.NDArray[np.floating]:
        if "weight_zero_point" in parts:
            _check_symmetric(module, self.symmetric, parts["weight_zero_point"], 0)
        return _narrow(self._each(parts[self.marks[0]], n))

    @staticmethod
    def _each(values: Array, n: int) -> Array:
        """One for each channel and group: [n, groups]."""
        rows = values.reshape(1, 1) if values.size == 1 else values.reshape(n, -1)
        return np.ascontiguousarray(np.broadcast_to(rows, (n, rows.shape[1])))


def _check_symmetric(module: Module, symmetric: bool, zeros: Array, middle: int) -> None:
    if symmetric and (zeros != middle).any():
        raise module.fail(
            "weight_zero_point", "holds zero points other than the middle, although symmetric is true"
        )


def _unsigned(signed: Array) -> npt.NDArray[np.uint8]:
    """int8 -128 .. 127 -> 0 .. 255."""
    codes: npt.NDArray[np.uint8] = signed.view(np.uint8) ^ np.uint8(0x80)
    return codes


def scheme(options: Options) -> Scheme:
    """ModelError for a variant that is not read."""
    form = options.one_of("format", (_PACKED, "float-quantized", *_BYTES))
    _refuse_more(options)
    groups = [(targets, _of_group(form, weights, inputs)) for targets, weights, inputs in _groups(options)]
    if len({scheme for _, scheme in groups}) == 1:
        return groups[0][1]
    return ByModule(tuple(groups), _NAME)


def _of_group(form: str, weights: Options, inputs: InputRounding) -> Scheme:
    if form == "float-quantized":
        weights.one_of("num_bits", (8,))
        weights.one_of("type", ("float",))
        return fp8.Fp8(_NAME, fp8.block_shape(weights, "block_structure"), inputs, "block_structure")
    weights.one_of("type", ("int",), "int")
    bits = weights.one_of("num_bits", (4, 8) if form == _PACKED else (8,))
    symmetric = weights.one_of("symmetric", (True, False), True)
    if form != _PACKED:
        weights.one_of("strategy", ("group", "channel", "tensor"))
        return Bytes(symmetric, inputs)
    grouped = weights.one_of("strategy", ("group", "channel")) == "group"
    if not grouped:
        return PackQuantized(bits, symmetric, -1, inputs)
    told = weights.values.get("group_size") is not None
    return PackQuantized(bits, symmetric, weights.group_size() if told else None, inputs)


def _refuse_more(options: Options) -> None:
    """What is done to weights or activations besides rounding them."""
    if options.values.get("transform_config"):
        raise options.fail("transform_config", "turns activations at run time, which is not supported")
    sparsity = options.part("sparsity_config")
    if sparsity is not None and sparsity.values:
        sparsity.one_of("format", ("dense",), "dense")


_PACKED, _BYTES = "pack-quantized", ("int-quantized", "naive-quantized")


def _groups(options: Options) -> Iterator[tuple[tuple[str, ...], Options, InputRounding]]:
    """Targets and `weights` of each of the config_groups, and how the inputs are rounded."""
    groups = options.part("config_groups")
    if groups is None or not groups.values:
        raise options.fail("config_groups", "is missing or empty")
    for name in groups.values:
        group = groups.part(name)
        weights = None if group is None else group.part("weights")
        if group is None or weights is None:
            raise groups.fail(name, "has no weights")
        targets = group.values.get("targets", ["Linear"])
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            raise group.fail("targets", f"is {shown(targets)}; a list of names is expected")
        yield tuple(targets), weights, _input_rounding(group.part("input_activations"))


def _input_rounding(asked: Options | None) -> InputRounding:
    if asked is None or not asked.values:
        return "none"
    return "bytes" if all(asked.values.get(key) == value for key, value in _BY_TOKEN.items()) else "other"


def encode_packed(tensor: GroupedTensor, symmetric: bool, dtype: np.dtype[Any]) -> dict[str, Array]:
    """The tensors of one matrix in `pack-quantized`."""
    codes, zeros = unsigned(tensor)
    parts: dict[str, Array] = {
        "weight_packed": pack(codes, tensor.bits),
        "weight_scale": np.ascontiguousarray(tensor.scales.astype(dtype)),
        "weight_shape": np.array(tensor.shape, np.int64),
    }
    if not symmetric:
        parts["weight_zero_point"] = np.ascontiguousarray(pack(zeros.T, tensor.bits).T)
    return parts


def encode_bytes(tensor: GroupedTensor, dtype: np.dtype[Any]) -> dict[str, Array]:
    """The tensors of one matrix in `int-quantized`."""
    return {"weight": tensor.codes, "weight_scale": np.ascontiguousarray(tensor.scales.astype(dtype))}


def packed_config(groups: Mapping[WeightScheme, list[str]], kept: list[str]) -> dict[str, Any]:
    """quantization_config for modules by scheme: the first stands for every linear module that is named
    nowhere. What is in no layer is always named: an embedding is not linear."""
    described = {}
    for i, (scheme, modules) in enumerate(groups.items()):
        outside = [name for name in modules if not any(part.isdigit() for part in name.split("."))]
        targets = ["Linear", *outside] if i == 0 else modules
        described[f"group_{i}"] = {"targets": targets, "weights": _weights(scheme)}
    return _config(_PACKED, described, kept)


def bytes_config(scheme: WeightScheme, kept: list[str]) -> dict[str, Any]:
    """quantization_config of W8A8: activations are rounded to 8 bits, a scale for each token."""
    group = {"targets": ["Linear"], "weights": _weights(scheme), "input_activations": _BY_TOKEN}
    return _config(_BYTES[0], {"group_0": group}, kept)


def _weights(scheme: WeightScheme) -> dict[str, Any]:
    weights = {"num_bits": scheme.bits, "type": "int", "symmetric": scheme.symmetric, "dynamic": False}
    if scheme.group_size == WHOLE_ROW:
        return weights | {"strategy": "channel"}
    return weights | {"strategy": "group", "group_size": scheme.group_size}


def _config(form: str, groups: dict[str, Any], kept: list[str]) -> dict[str, Any]:
    """Readers build an output matrix for tied models too, which `Linear` would mean: it is always named."""
    named = {target for group in groups.values() for target in group["targets"]} | {*kept}
    return {
        "quant_method": _NAME,
        "format": form,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": kept if _HEAD in named else [*kept, _HEAD],
    }
