"""Weights of one model under canonical names, whatever files they come from.

Owns the check of a file's tensors against the spec (missing, extra, mis-shaped) and the selection of rows.
Knows no family: a family hands over its name table. Knows no file format: a `Store` does.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from lmdeploy.errors import ModelError
from lmdeploy.models.formats.gguf_blocks import WIDE_SCALES, TensorKind
from lmdeploy.models.gguf import GGUFFile
from lmdeploy.models.spec import ModelSpec
from lmdeploy.quant.scheme import InputRounding
from lmdeploy.quant.tensors import GroupedTensor, StoredMatrix, Tensor

if TYPE_CHECKING:
    from lmdeploy.models.packed import Packed

Rows = npt.NDArray[np.intp] | slice


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a header says of one canonical tensor.

    bits: of one value as it is read; group_size: values per scale, 0 for float kinds; file_bytes: its share
    of the file; ordered: reading gives an order of the inputs (GroupedTensor.order); inputs: how the file
    says they are rounded.
    """

    shape: tuple[int, ...]
    kind: TensorKind
    bits: int
    group_size: int
    file_bytes: int
    ordered: bool = False
    inputs: InputRounding = "none"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a canonical tensor is found: a tensor of the file, and which of its rows in which order.

    otherwise: where it is in files that have no such tensor.
    """

    name: str
    rows: Callable[[ModelSpec, int], Rows] | None = None  # given the spec and the layer number
    otherwise: Source | None = None


NameTable = Mapping[str, Source]  # canonical name -> source; both may hold {i}, the layer number


class Store(Protocol):
    """One opened file or set of files, by the file's own tensor names."""

    @property
    def source(self) -> str: ...
    @property
    def notes(self) -> tuple[str, ...]: ...
    @property
    def model_format(self) -> str: ...
    @property
    def files(self) -> tuple[Path, ...]: ...
    def names(self) -> Iterable[str]: ...
    def info(self, name: str) -> TensorInfo: ...
    def read(self, name: str) -> Tensor: ...
    def groups(self, name: str) -> npt.NDArray[np.integer]:
        """The group of each input, of a tensor whose header says that it is ordered."""

    def stored_matrix(self, name: str) -> StoredMatrix | None: ...
    def release(self, name: str) -> None: ...
    def close(self) -> None: ...


class GGUFStore:
    """Tensors of a GGUF file."""

    model_format = "gguf"

    def __init__(self, file: GGUFFile) -> None:
        self._file, self.source = file, str(file.path)
        self.files = (file.path,)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not held as the file has it, one line each."""
        kinds = {tensor.layout.name for tensor in self._file.tensors.values()}
        wide = ", ".join(kind for kind in WIDE_SCALES if kind in kinds)
        return (
            (f"the native engine rounds group scales of {wide} to float16; codes are as in the file",)
            if wide
            else ()
        )

    def names(self) -> Iterable[str]:
        return self._file.tensors.keys()

    def info(self, name: str) -> TensorInfo:
        tensor = self._file.tensors[name]
        layout = tensor.layout
        return TensorInfo(tensor.shape, layout.kind, layout.bits, layout.group, tensor.file_bytes)

    def read(self, name: str) -> Tensor:
        return self._file.read(name)

    def groups(self, name: str) -> npt.NDArray[np.integer]:
        raise KeyError(name)

    def stored_matrix(self, name: str) -> StoredMatrix | None:
        return self._file.stored(name)

    def release(self, name: str) -> None:
        self._file.release(name)

    def close(self) -> None:
        self._file.close()


class Checkpoint:
    """The weights of `spec`, read one tensor at a time. Opening reads headers only."""

    def __init__(
        self,
        spec: ModelSpec,
        store: Store,
        table: NameTable,
        ignored: Callable[[str], bool],
        notes: tuple[str, ...] = (),
        packed: Packed | None = None,
    ) -> None:
        """ignored: whether a tensor of the files may be there unread. notes: what else is to be said."""
        self.spec, self._store, self._notes = spec, store, notes
        self.packed = packed  # set when `source` is a folder in packed form: then no tensor can be read
        self._sources = _resolve(spec, store, table, ignored)
        self._copy_of_embedding = table["lm_head.weight"].name if spec.tie_embeddings else None

    @property
    def source(self) -> str:
        """The file or directory, for messages."""
        return self._store.source

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not read, or not held as the files have it, one line each, for the start-up account."""
        return (*self._notes, *self._store.notes)

    @property
    def model_format(self) -> str:
        """A name that `model_format` takes."""
        return self._store.model_format

    @property
    def files(self) -> tuple[Path, ...]:
        """All files that spec and weights are read from."""
        return self._store.files

    def names(self) -> frozenset[str]:
        """Canonical names of all tensors the spec asks for."""
        return frozenset(self._sources)

    def info(self, name: str) -> TensorInfo:
        """From headers only. KeyError when the spec has no such tensor."""
        source, rows = self._sources[name]
        info = self._store.info(source)
        if rows is None:
            return info
        shape = (_row_count(rows, info.shape[0]), *info.shape[1:])
        share = info.file_bytes * shape[0] // info.shape[0]
        return replace(info, shape=shape, file_bytes=share)

    def stored_name(self, name: str) -> str:
        """What the files call a tensor."""
        return self._sources[name][0]

    def placement(self, name: str) -> tuple[str, Rows | None]:
        """What the files call the tensor that holds this one, and which of its rows it is (None: all)."""
        return self._sources[name]

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor of the files that holds this one."""
        return self._store.info(self._sources[name][0]).shape

    def unread(self) -> list[str]:
        """The files' tensors that no canonical name means, but for a second copy of tied embeddings."""
        used = {stored for stored, _ in self._sources.values()}
        return sorted(set(self._store.names()) - used - {self._copy_of_embedding})

    def read_stored(self, stored: str) -> Tensor:
        """A whole tensor by the files' name, of any type, values unchecked."""
        return self._store.read(stored)

    def release_stored(self, stored: str) -> None:
        """`release` by the files' name."""
        self._store.release(stored)

    def called(self, name: str) -> str:
        """A tensor and where it is, for messages."""
        return f"{self.source}: tensor {self.stored_name(name)!r}"

    def groups(self, name: str) -> npt.NDArray[np.integer]:
        """The group of each input [K], for a tensor that `info` calls ordered; reads nothing else of it."""
        return self._store.groups(self._sources[name][0])

    def read(self, name: str) -> Tensor:
        """The values, exactly as stored; ModelError when one is not finite. Float arrays may be read-only
        views of the file."""
        source, rows = self._sources[name]
        tensor = self._store.read(source)
        if not is_finite(tensor):
            raise ModelError(
                f"{self.source}: tensor {source!r} holds values that are not finite (NaN or infinite)."
            )
        if rows is None:
            return tensor
        return tensor.rows(rows) if isinstance(tensor, GroupedTensor) else tensor[rows]

    def stored_matrix(self, name: str) -> StoredMatrix | None:
        """A matrix as the file holds it, values unchecked; None where only `read` gives it."""
        source, rows = self._sources[name]
        stored = self._store.stored_matrix(source)
        return stored if rows is None or stored is None else stored.select(rows)

    def release(self, name: str) -> None:
        """Give back the memory that reading a tensor took; it can be read again."""
        self._store.release(self._sources[name][0])

    def close(self) -> None:
        self._store.close()


_EXPONENTS: dict[str, tuple[type[np.unsignedinteger], int]] = {
    "float32": (np.uint32, 0x7F800000),
    "float16": (np.uint16, 0x7C00),
    "bfloat16": (np.uint16, 0x7F80),
}
_CHUNK = 1 << 16  # values; small enough for the cache, so that the check costs little beside reading


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite (exponent bits all set)."""
    if isinstance(tensor, GroupedTensor):
        return all(part is None or is_finite(part) for part in (tensor.scales, tensor.mins))
    unsigned, mask = _EXPONENTS[tensor.dtype.name]
    bits = np.ascontiguousarray(tensor).reshape(-1).view(unsigned)
    return all(int((bits[i : i + _CHUNK] & unsigned(mask)).max()) < mask for i in range(0, bits.size, _CHUNK))


def _row_count(rows: Rows, total: int) -> int:
    return len(range(*rows.indices(total))) if isinstance(rows, slice) else len(rows)


def _resolve(
    spec: ModelSpec, store: Store, table: NameTable, ignored: Callable[[str], bool]
) -> dict[str, tuple[str, Rows | None]]:
    """Canonical name -> (the file's name, rows); refuses what is missing, mis-shaped or unaccounted for."""
    present, used = set(store.names()), set[str]()
    resolved: dict[str, tuple[str, Rows | None]] = {}
    for name, shape in spec.tensors():
        layer, pattern = _pattern(name)
        source = table[pattern]
        if source.otherwise is not None and source.otherwise.name.format(i=layer) in present:
            source = source.otherwise
        found = source.name.format(i=layer)
        if found not in present:
            raise ModelError(f"{store.source}: tensor {found!r} is missing{_similar(found, present)}.")
        # No more rows are listed than the tensor has: a damaged description must not size an allocation.
        listed = source.rows if store.info(found).shape[:1] >= shape[:1] else None
        rows = listed(spec, layer) if listed else None
        _check_shape(store, found, shape, rows)
        resolved[name] = found, rows
        used.add(found)
    _check_shared(store, resolved)
    extra = sorted(name for name in present - used if not ignored(name))
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise ModelError(
            f"{store.source}: tensor {extra[0]!r}{more} has no place in a {spec.family} model with"
            f" {len(spec.layers)} layers; the description and the weights do not belong together."
        )
    return resolved


def _check_shared(store: Store, resolved: Mapping[str, tuple[str, Rows | None]]) -> None:
    """The parts of a tensor that several canonical ones share must be all of it."""
    counts: dict[str, int] = {}
    for found, rows in resolved.values():
        total = store.info(found).shape[0]
        counts[found] = counts.get(found, 0) + (total if rows is None else _row_count(rows, total))
    for found, count in counts.items():
        shape = store.info(found).shape
        if count != shape[0]:
            expected = [count, *shape[1:]]
            raise ModelError(
                f"{store.source}: tensor {found!r} has shape {list(shape)}; {expected} is expected."
            )


def _pattern(name: str) -> tuple[int, str]:
    """'layers.3.attn_norm.weight' -> (3, 'layers.{i}.attn_norm.weight'); layer 0 for names without one."""
    if not name.startswith("layers."):
        return 0, name
    _, number, rest = name.split(".", 2)
    return int(number), "layers.{i}." + rest


def _similar(name: str, present: set[str]) -> str:
    close = difflib.get_close_matches(name, present, 1, 0.9)
    return f" (there is {close[0]!r})" if close else ""


def _check_shape(store: Store, name: str, expected: tuple[int, ...], rows: Rows | None) -> None:
    shape = store.info(name).shape
    if rows is None or not shape:
        good = shape == expected
    else:
        last = (rows.stop or 0) - 1 if isinstance(rows, slice) else int(rows.max())
        good = last < shape[0] and (_row_count(rows, shape[0]), *shape[1:]) == expected
    if not good:
        raise ModelError(
            f"{store.source}: tensor {name!r} has shape {list(shape)}; {list(expected)} is expected."
        )
