"""What the formats share: typed options, the tensors of one quantised matrix, unpacking of small integers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import ml_dtypes  # noqa: F401  (first: it registers bfloat16 with NumPy)
import numpy as np
import numpy.typing as npt

from lmdeploy.errors import ModelError
from lmdeploy.models.fields import shown
from lmdeploy.models.formats.gguf_blocks import TensorKind
from lmdeploy.quant.scheme import InputRounding
from lmdeploy.quant.tensors import GroupedTensor, StoredMatrix, Tensor

Array = npt.NDArray[Any]
_Value = TypeVar("_Value", bound=np.generic)
FLOATS = ("F16", "BF16", "F32")


class Options:
    """quantization_config, or a part of it; messages name the field."""

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "quantization_config") -> None:
        self.values, self.source, self.prefix = values, source, prefix

    def fail(self, key: str, what: str) -> ModelError:
        return ModelError(f"{self.source}: {self.prefix}.{key} {what}.")

    def one_of(self, key: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        """The value of `key`, which must be among `allowed`; texts are compared in lower case."""
        value = self.values.get(key)
        value = default if value is None else value
        value = value.lower() if isinstance(value, str) else value
        if not any(type(value) is type(one) and value == one for one in allowed):
            raise self.fail(
                key, f"is {shown(value)}, which cannot be read (readable: {', '.join(map(str, allowed))})"
            )
        return value

    def group_size(self, default: int | None = None) -> int:
        """Inputs per scale: a multiple of 32, or -1 for one scale per output channel."""
        value = self.values.get("group_size", default)
        if type(value) is not int or (value != -1 and (value < 32 or value % 32)):
            raise self.fail("group_size", f"is {shown(value)}; a multiple of 32, or -1, is expected")
        return value

    def part(self, key: str) -> Options | None:
        """A JSON object inside, or None when absent or null."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.fail(key, "is no object")
        return None if value is None else Options(value, self.source, f"{self.prefix}.{key}")


@dataclass(frozen=True, slots=True)
class Header:
    """Of one stored tensor: shape and safetensors type name."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Matrix:
    """What reading one quantised matrix yields: [N, K], see models.checkpoint.TensorInfo."""

    shape: tuple[int, int]
    kind: TensorKind
    bits: int
    group_size: int
    ordered: bool = False
    inputs: InputRounding = "none"


@dataclass(frozen=True, slots=True)
class Module:
    """The stored tensors of one matrix by their last name, for checks; `name` and `source` for messages."""

    source: str
    name: str
    headers: Mapping[str, Header]

    def fail(self, part: str, what: str) -> ModelError:
        return ModelError(f"{self.source}: tensor '{self.name}.{part}' {what}.")

    def plane(self, part: str, dtypes: tuple[str, ...]) -> tuple[int, int]:
        """Shape of a two-dimensional part of one of these types."""
        self.check(part, dtypes)
        shape = self.headers[part].shape
        if len(shape) != 2 or not all(shape):
            raise self.fail(part, f"has shape {list(shape)}; two dimensions are expected")
        return shape[0], shape[1]

    def check(self, part: str, dtypes: tuple[str, ...], shape: tuple[int, ...] | None = None) -> None:
        """That a part is there, of one of these types and of this shape."""
        header = self.headers.get(part)
        if header is None:
            raise self.fail(part, "is missing")
        if header.dtype not in dtypes:
            raise self.fail(part, f"is of type {header.dtype}; {' or '.join(dtypes)} is expected")
        if shape is not None and header.shape != shape:
            raise self.fail(part, f"has shape {list(header.shape)}; {list(shape)} is expected")


class Scheme(Protocol):
    """One format with its options."""

    @property
    def name(self) -> str: ...
    @property
    def notes(self) -> tuple[str, ...]: ...
    @property
    def marks(self) -> tuple[str, ...]:
        """Last names of the tensors of which one says that its matrix is quantised."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Last names of all tensors of a quantised matrix, also those that are not read."""

    @property
    def order_part(self) -> str:
        """Last name of the tensor that gives the group of each input; "" where there is none."""

    def matrix(self, module: Module) -> Matrix:
        """From headers; ModelError naming the tensor that does not fit."""

    def read(self, module: Module, parts: Mapping[str, Array]) -> Tensor:
        """The values, from stored tensors [as `matrix` has checked them]."""

    def stored(self, module: Module, parts: Mapping[str, Array]) -> StoredMatrix | None:
        """The same with its codes as they are stored, or None. ModelError as `read`."""


@dataclass(frozen=True, slots=True)
class ByModule:
    """A format for each module: groups of (targets, format), as the package that defines them applies them.

    A module's own name as target goes before a pattern (`re:`), and that before its kind (`Linear`).
    """

    groups: tuple[tuple[tuple[str, ...], Scheme], ...]
    name: str

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(note for _, scheme in self.groups for note in scheme.notes))

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(mark for _, scheme in self.groups for mark in scheme.marks))

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(part for _, scheme in self.groups for part in scheme.parts))

    @property
    def order_part(self) -> str:
        return next((scheme.order_part for _, scheme in self.groups if scheme.order_part), "")

    def matrix(self, module: Module) -> Matrix:
        return self._of(module).matrix(module)

    def read(self, module: Module, parts: Mapping[str, Array]) -> Tensor:
        return self._of(module).read(module, parts)

    def stored(self, module: Module, parts: Mapping[str, Array]) -> StoredMatrix | None:
        return self._of(module).stored(module, parts)

    def _of(self, module: Module) -> Scheme:
        ranked = (
            (_rank(target, module.name), scheme) for targets, scheme in self.groups for target in targets
        )
        rank, scheme = min(ranked, key=lambda one: one[0])
        if rank == _NO_MATCH:
            raise ModelError(
                f"{module.source}: module {module.name!r} is quantised, but no target of config_groups fits."
            )
        return scheme


_NO_MATCH = 3


def _rank(target: str, module: str) -> int:
    """How well a target of config_groups fits a module, 0: best."""
    if target == module:
        return 0
    if target.startswith("re:"):
        return 1 if re.match(target[3:], module) else _NO_MATCH
    return 2 if target == "Linear" else _NO_MATCH


def unpack(words: Array, bits: int) -> npt.NDArray[np.uint8]:
    """int32 [..., n] -> codes uint8 [..., n * 32 / bits], lowest bits first; bits is 4 or 8."""
    packed = np.ascontiguousarray(words, dtype="<i4").view(np.uint8)
    if bits == 8:
        return packed
    codes = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    np.bitwise_and(packed, 15, out=codes[..., 0::2])
    np.right_shift(packed, 4, out=codes[..., 1::2])
    return codes


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of K inputs in a file, of which the last may be shorter, and as whole groups of `size`.

    Executors know whole groups only: the scale of a file's group stands for each of the parts it is cut into.
    """

    inputs: int
    stored_size: int

    @classmethod
    def of(cls, inputs: int, group_size: int) -> Groups:
        """group_size: of the file, -1: one group."""
        return cls(inputs, inputs if group_size == -1 else min(group_size, inputs))

    @property
    def stored(self) -> int:
        """How many the file has."""
        return -(-self.inputs // self.stored_size)

    @property
    def size(self) -> int:
        return math.gcd(self.inputs, self.stored_size)

    def spread(self, values: npt.NDArray[_Value]) -> npt.NDArray[_Value]:
        """[N, groups of the file] -> [N, whole groups]."""
        parts = self.stored_size // self.size
        return values if parts == 1 else np.repeat(values, parts, 1)[:, : self.inputs // self.size]


def channel_scales(scales: Array) -> npt.NDArray[np.floating]:
    """[groups, N] as stored -> [N, groups], float16 as it is, other types as float32."""
    wide = scales if scales.dtype == np.float16 else scales.astype(np.float32)
    return np.ascontiguousarray(wide.T)


ROUNDED_ZEROS = "the native engine rounds zero points of 8-bit weights, by 1/8 of a step at most"


def with_zeros(
    codes: npt.NDArray[np.uint8],
    zeros: npt.NDArray[np.uint8],
    scales: Array,
    order: npt.NDArray[np.int32] | None = None,
) -> GroupedTensor:
    """8 bits as code * scale + minimum: the minimum, -zero * scale, is a product in float32.

    codes [N, K]; zeros and scales [N, groups]. A weight with code = zero need not be exactly 0 once an engine
    rounds the minimum to float16.
    """
    mins = zeros.astype(np.float32) * -scales.astype(np.float32)
    return GroupedTensor(8, codes.shape[1] // scales.shape[1], codes, scales, mins=mins, order=order)


def order_of(module: Module, part: str, group_of: Array, group: int) -> npt.NDArray[np.int32]:
    """Inputs sorted by the group that `group_of` [K] gives each (act-order); every group must be full."""
    order = np.argsort(group_of, kind="stable").astype(np.int32)
    if not np.array_equal(group_of[order], np.arange(len(order)) // group):
        raise module.fail(part, f"does not place {group} inputs in each group")
    return order


def pack(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.int32]:
    """Codes [..., n] -> int32 [..., ceil(n bits / 32)], lowest bits first, the last word filled with 0."""
    per_word = 32 // bits
    missing = -codes.shape[-1] % per_word
    padded = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
    if bits == 4:
        padded = padded[..., 0::2] | padded[..., 1::2] << np.uint8(4)
    return np.ascontiguousarray(padded).view("<i4")


def unsigned(tensor: GroupedTensor) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Codes [N, K] and zero points [N, groups] from 0 on; those of signed codes are in the middle."""
    if tensor.zeros is not None:
        return tensor.codes.view(np.uint8), tensor.zeros
    assert tensor.mins is None and tensor.bits == 8
    return tensor.codes.view(np.uint8) ^ np.uint8(0x80), np.full(tensor.scales.shape, 128, np.uint8)
