"""Weights of a Hugging Face directory: one model.safetensors or shards with an index, memory-mapped.

Without torch. Serves float32, float16 and bfloat16 as tensors of a model; other types as stored, for the
formats made of them. Knows tensor names as the files spell them, no family.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # first: it registers bfloat16 with NumPy
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from lmdeploy.errors import ModelError
from lmdeploy.models.checkpoint import TensorInfo
from lmdeploy.models.files import check_readable, is_there, read_json
from lmdeploy.models.formats.gguf_blocks import TensorKind
from lmdeploy.models.formats.module import Header
from lmdeploy.models.gguf import release_pages
from lmdeploy.quant.tensors import StoredMatrix, Tensor

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_KINDS: dict[str, tuple[TensorKind, int]] = {
    "F32": ("float32", 32),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
}
_DTYPES: dict[str, Any] = {
    **{
        "F64": "<f8",
        "F32": "<f4",
        "F16": "<f2",
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
    },
    **{
        "I64": "<i8",
        "I32": "<i4",
        "I16": "<i2",
        "I8": "i1",
        "U64": "<u8",
        "U32": "<u4",
        "U8": "u1",
        "BOOL": "?",
    },
}


@dataclass(frozen=True, slots=True)
class _Place:
    """offset: of the tensor's first byte in its file."""

    shard: Path
    map: mmap.mmap
    offset: int
    header: Header


class SafetensorsStore:
    """All tensors of a directory. Opening maps the files and reads their headers."""

    notes: tuple[str, ...] = ()
    model_format = "hf"

    def __init__(self, directory: Path) -> None:
        self.source = str(directory)
        self._places: dict[str, _Place] = {}
        shards = _shards(directory)
        old = directory / "quantize_config.json"
        self.files = (directory / "config.json", *([old] if is_there(old) else []), *shards)
        for shard, names in shards.items():
            self._open(shard, names)

    def _open(self, shard: Path, expected: set[str] | None) -> None:
        if not is_there(shard):
            raise ModelError(f"{shard}: a weight file that {_INDEX} names is missing; fetch the model again.")
        check_readable(shard)
        try:
            handle: Any = safe_open(str(shard), framework="np")  # checks the header
            with shard.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{shard}: not a sound safetensors file ({error}); it may be cut off: fetch it again."
            ) from None
        names = set(handle.keys())
        length = int.from_bytes(mapped[:8], "little")
        table = json.loads(mapped[8 : 8 + length])
        for name in sorted((expected or names) - names):
            raise ModelError(f"{shard}: tensor {name!r} is missing, although {_INDEX} places it there.")
        for name in sorted(names):
            if name in self._places:
                raise ModelError(f"{shard}: tensor {name!r} occurs in a second weight file too.")
            begin, end = table[name]["data_offsets"]
            header = Header(tuple(table[name]["shape"]), table[name]["dtype"], end - begin)
            self._places[name] = _Place(shard, mapped, 8 + length + begin, header)

    def names(self) -> Iterable[str]:
        return self._places.keys()

    def info(self, name: str) -> TensorInfo:
        """ModelError for a type that no tensor of a model has by itself."""
        place = self._places[name]
        return _info(place.shard, name, place.header)

    def header(self, name: str) -> Header:
        """Of any type."""
        return self._places[name].header

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self.stored(name)
        return tensor

    def groups(self, name: str) -> npt.NDArray[np.integer]:
        raise KeyError(name)

    def stored(self, name: str) -> npt.NDArray[Any]:
        """The values of a tensor of any type that NumPy or ml_dtypes has: a read-only view of the file."""
        place = self._places[name]
        header = place.header
        if header.dtype not in _DTYPES:
            raise ModelError(
                f"{place.shard}: tensor {name!r} is of type {header.dtype}, which cannot be read."
            )
        raw = np.frombuffer(place.map, np.uint8, header.nbytes, place.offset)
        values: npt.NDArray[Any] = raw.view(_DTYPES[header.dtype]).reshape(header.shape)
        return values

    def stored_matrix(self, name: str) -> StoredMatrix | None:
        """A matrix of floats as it is in the file."""
        place = self._places[name]
        if len(place.header.shape) != 2 or place.header.dtype not in _KINDS:
            return None
        n, k = place.header.shape
        raw = np.frombuffer(place.map, np.uint8, place.header.nbytes, place.offset)
        kind: Any = _KINDS[place.header.dtype][0]
        return StoredMatrix(kind, raw.reshape(n, -1), (n, k), 0)

    def release(self, name: str) -> None:
        place = self._places[name]
        release_pages(place.map, place.offset, place.header.nbytes)

    def close(self) -> None:
        self._places.clear()


def _shards(directory: Path) -> dict[Path, set[str] | None]:
    """Weight file -> the tensors the index places in it (None without an index)."""
    if not is_there(directory / _INDEX):
        return {_single(directory): None}
    table = read_json(directory / _INDEX).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise ModelError(f"{directory / _INDEX}: weight_map is missing or empty.")
    shards: dict[Path, set[str]] = {}
    for name, file in table.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelError(
                f"{directory / _INDEX}: weight_map places {name!r} in {file!r}, which is no file name."
            )
        shards.setdefault(directory / file, set()).add(name)
    return dict(shards)


def _single(directory: Path) -> Path:
    files = [file for file in sorted(directory.glob("*.safetensors")) if is_there(file)]
    if len(files) == 1:
        return files[0]
    if directory / _SINGLE in files:
        return directory / _SINGLE
    if files:
        raise ModelError(
            f"{directory}: holds {len(files)} safetensors files but no {_INDEX}; fetch the model again."
        )
    others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in directory.glob(pattern))
    hint = f" ({others[0]} is of a kind that is not read; convert it to safetensors)" if others else ""
    raise ModelError(f"{directory}: holds config.json but no safetensors weights{hint}.")


def _info(shard: Path, name: str, header: Header) -> TensorInfo:
    if header.dtype not in _KINDS:
        supported = ", ".join(_KINDS)
        raise ModelError(
            f"{shard}: tensor {name!r} is of kind {header.dtype}, which is not supported"
            f" (supported: {supported})."
        )
    yields, bits = _KINDS[header.dtype]
    return TensorInfo(header.shape, yields, bits, 0, header.nbytes)
