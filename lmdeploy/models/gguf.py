"""GGUF container: metadata and tensors of one file, read over a memory map.

Format: versions 2 and 3 of the public GGUF specification (little endian; header, key-value pairs, tensor
table, aligned data). Knows number formats and byte layouts, no model family and no canonical name. Every
damaged file ends in a ModelError of one line; counts and lengths are checked against the file's size before
they are used, so that a damaged header cannot ask for memory.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt

from lmdeploy.errors import ModelError
from lmdeploy.models.files import unreadable
from lmdeploy.models.formats.gguf_blocks import LAYOUTS, Layout, TensorKind, unpack
from lmdeploy.quant.tensors import Form, StoredMatrix, Tensor

_MAX_DIMS = 4
_HEADER_LIMIT = 64 << 20  # bytes; vocabularies of a million tokens take less, a damaged count could take all

# Names of the kinds that exist but are not read, for the message only.
_OTHER_KINDS = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64",
    28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, str] = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "u1",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies. `shape` is outermost first (the file stores innermost first)."""

    name: str
    shape: tuple[int, ...]
    layout: Layout
    offset: int  # from the start of the file
    file_bytes: int


class GGUFFile:
    """One open GGUF file. Raises ModelError on anything that is not a sound file of the supported kinds."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._map = _map_file(self.path)
        cursor = _Cursor(self.path, self._map)
        tensor_count, pair_count = cursor.header()
        self.metadata: dict[str, Any] = cursor.pairs(pair_count)
        table = cursor.tensor_table(tensor_count)
        self.tensors: dict[str, GGUFTensor] = _place(
            self.path, table, cursor.position, len(self._map), self._alignment()
        )

    def _alignment(self) -> int:
        value = self.metadata.get("general.alignment", 32)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0 or value % 8:
            raise ModelError(
                f"{self.path}: general.alignment is {value!r}; it must be a positive multiple of 8."
            )
        return value

    def read(self, name: str) -> Tensor:
        """The tensor's values without a second rounding.

        Float kinds are views of the file (read-only); quantised matrices are GroupedTensors [rows, columns];
        quantised vectors become float32.
        """
        tensor = self.tensors[name]
        raw = np.frombuffer(self._map, np.uint8, tensor.file_bytes, tensor.offset)
        layout = tensor.layout
        if layout.unpack is None:
            return _floats(raw, layout.kind).reshape(tensor.shape)
        grouped = unpack(layout, raw.reshape(-1, tensor.shape[-1] // layout.block, layout.block_bytes))
        return grouped if len(tensor.shape) == 2 else grouped.dequantize().reshape(tensor.shape)

    def stored(self, name: str) -> StoredMatrix | None:
        """A matrix as it is in the file."""
        tensor = self.tensors[name]
        if len(tensor.shape) != 2:
            return None
        layout, (n, k) = tensor.layout, tensor.shape
        raw = np.frombuffer(self._map, np.uint8, tensor.file_bytes, tensor.offset)
        form = layout.name if layout.unpack is not None else layout.kind
        return StoredMatrix(cast(Form, form), raw.reshape(n, -1), (n, k), layout.group)

    def release(self, name: str) -> None:
        """Take the tensor's pages out of this process; they are read again when needed."""
        tensor = self.tensors[name]
        release_pages(self._map, tensor.offset, tensor.file_bytes)

    def close(self) -> None:
        """Give up the file. Arrays that are views of it keep the map alive until they are gone."""
        self._map = b""


def release_pages(file: mmap.mmap, begin: int, nbytes: int) -> None:
    """Take part of a mapped file out of this process's memory."""
    start = begin // mmap.PAGESIZE * mmap.PAGESIZE
    file.madvise(mmap.MADV_DONTNEED, start, begin + nbytes - start)


def _map_file(path: Path) -> Any:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size < 24:
                raise ModelError(f"{path}: not a GGUF file (shorter than its header).")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise unreadable(path, error) from None


class _Cursor:
    """Reads the header part of the file front to back; every step is checked against the file's end."""

    def __init__(self, path: Path, buffer: Any) -> None:
        self.path, self.buffer, self.position = path, buffer, 0
        self.size = min(len(buffer), _HEADER_LIMIT)

    def fail(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: damaged GGUF file: {what}.")

    def take(self, form: struct.Struct) -> Any:
        start, self.position = self.position, self.position + form.size
        if self.position > self.size:
            raise self.fail(f"its header does not end within {self.size} bytes")
        return form.unpack_from(self.buffer, start)[0]

    def count(self, what: str, least_bytes: int) -> int:
        """A 64-bit count of things that take at least `least_bytes` each."""
        count = int(self.take(_U64))
        if count * least_bytes > self.size - self.position:
            raise self.fail(f"it claims {count} {what}, more than {self.size} bytes of header can hold")
        return count

    def header(self) -> tuple[int, int]:
        magic = bytes(self.buffer[:4])
        if magic != b"GGUF":
            raise ModelError(f"{self.path}: not a GGUF file (it starts with {magic!r}, not b'GGUF').")
        self.position = 4
        version = self.take(_U32)
        if version not in (2, 3):
            hint = "; it is a big-endian file" if version in (2 << 24, 3 << 24) else ""
            raise ModelError(f"{self.path}: GGUF version {version} is not supported{hint} (supported: 2, 3).")
        return self.count("tensors", 24), self.count("metadata entries", 13)

    def text(self, what: str) -> str:
        length = self.count(f"bytes of {what}", 1)
        start, self.position = self.position, self.position + length
        try:
            return bytes(self.buffer[start : self.position]).decode()
        except UnicodeDecodeError:
            raise self.fail(f"{what} at byte {start} is not UTF-8") from None

    def pairs(self, count: int) -> dict[str, Any]:
        pairs: dict[str, Any] = {}
        for _ in range(count):
            key = self.text("a metadata key")
            if key in pairs:
                raise self.fail(f"metadata key {key!r} occurs twice")
            pairs[key] = self.value(key, int(self.take(_U32)))
        return pairs

    def value(self, key: str, code: int) -> Any:
        if code == _STRING:
            return self.text(f"the value of {key!r}")
        if code == _ARRAY:
            return self.array(key)
        if code not in _SCALARS:
            raise self.fail(f"metadata key {key!r} has unknown type {code}")
        value = self.scalars(code, 1).item()
        return bool(value) if code == _BOOL else value

    def scalars(self, code: int, count: int) -> npt.NDArray[Any]:
        kind = np.dtype(_SCALARS[code])
        start, self.position = self.position, self.position + count * kind.itemsize
        if self.position > self.size:
            raise self.fail(f"its header does not end within {self.size} bytes")
        return np.frombuffer(self.buffer[start : self.position], kind)

    def array(self, key: str) -> list[Any]:
        """Of texts, numbers or truth values."""
        code = int(self.take(_U32))
        if code != _STRING and code not in _SCALARS:
            raise self.fail(f"metadata key {key!r} is an array of unsupported type {code}")
        count = self.count(
            f"elements of {key!r}", 8 if code == _STRING else np.dtype(_SCALARS[code]).itemsize
        )
        if code == _STRING:
            return self.strings(key, count)
        values = self.scalars(code, count)
        return list((values != 0 if code == _BOOL else values).tolist())

    def strings(self, key: str, count: int) -> list[str]:
        # Vocabularies have 10^5 entries: a plain loop over local names keeps start-up short.
        buffer, size, position, read = self.buffer, self.size, self.position, _U64.unpack_from
        found: list[bytes] = []
        for _ in range(count):
            if position + 8 > size:
                raise self.fail(f"{key!r} does not end within {size} bytes")
            start = position + 8
            position = start + read(buffer, position)[0]
            if position > size:
                raise self.fail(f"{key!r} does not end within {size} bytes")
            found.append(buffer[start:position])
        self.position = position
        try:
            return [entry.decode() for entry in found]
        except UnicodeDecodeError:
            raise self.fail(f"an element of {key!r} is not UTF-8") from None

    def tensor_table(self, count: int) -> list[tuple[str, tuple[int, ...], int, int]]:
        """(name, shape outermost first, kind code, offset from the start of the data) of every tensor."""
        table = []
        for _ in range(count):
            name = self.text("a tensor name")
            dims = int(self.take(_U32))
            if not 1 <= dims <= _MAX_DIMS:
                raise self.fail(f"tensor {name!r} has {dims} dimensions (1 to {_MAX_DIMS} are possible)")
            shape = tuple(int(self.take(_U64)) for _ in range(dims))[::-1]
            table.append((name, shape, int(self.take(_U32)), int(self.take(_U64))))
        return table


_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


def _place(
    path: Path, table: list[tuple[str, tuple[int, ...], int, int]], header_end: int, size: int, alignment: int
) -> dict[str, GGUFTensor]:
    start = -(-header_end // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, code, offset in table:
        layout = _layout(path, name, code)
        if name in tensors:
            raise ModelError(f"{path}: damaged GGUF file: tensor {name!r} occurs twice.")
        values = 1
        for extent in shape:
            values *= extent
        if not values or shape[-1] % layout.block:
            raise ModelError(
                f"{path}: damaged GGUF file: tensor {name!r} of kind {layout.name} has shape {shape}."
            )
        file_bytes = values // layout.block * layout.block_bytes
        if offset % alignment:
            raise ModelError(
                f"{path}: damaged GGUF file: tensor {name!r} begins at byte {offset} of the data, which is no"
                f" multiple of the alignment, {alignment}."
            )
        if start + offset + file_bytes > size:
            raise ModelError(
                f"{path}: tensor {name!r} should take {file_bytes} bytes at offset {start + offset}, but the"
                f" file has {size} bytes: it is cut off or damaged; fetch it again."
            )
        tensors[name] = GGUFTensor(name, shape, layout, start + offset, file_bytes)
    _check_apart(path, tensors)
    return tensors


def _check_apart(path: Path, tensors: dict[str, GGUFTensor]) -> None:
    placed = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for first, second in itertools.pairwise(placed):
        if first.offset + first.file_bytes > second.offset:
            raise ModelError(
                f"{path}: damaged GGUF file: tensors {first.name!r} and {second.name!r} overlap."
            )


def _layout(path: Path, name: str, code: int) -> Layout:
    if code in LAYOUTS:
        return LAYOUTS[code]
    supported = ", ".join(sorted(layout.name for layout in LAYOUTS.values()))
    kind = _OTHER_KINDS.get(code, f"number {code}")
    raise ModelError(
        f"{path}: tensor {name!r} is of kind {kind}, which is not supported (supported: {supported})."
    )


def _floats(raw: npt.NDArray[np.uint8], kind: TensorKind) -> npt.NDArray[np.floating]:
    if kind == "bfloat16":
        return raw.view(np.dtype(ml_dtypes.bfloat16))
    return raw.view(np.dtype("<f4") if kind == "float32" else np.dtype("<f2"))
