"""Safetensors files, written tensor by tensor in pieces: nothing is held but what the caller holds.

The layout is that of the public format: length of the header, header as JSON, values. A file has another name
until it is whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # first: it registers bfloat16 with NumPy
import numpy as np
import numpy.typing as npt

from lmdeploy.errors import ModelError
from lmdeploy.models.checkpoint import is_finite

_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
FLOATS: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
_PIECE = 1 << 22  # values


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: its values, and the type they are stored in."""

    values: npt.NDArray[Any]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return self.values.size * self.dtype.itemsize


def write_shard(path: Path, entries: Mapping[str, Entry]) -> None:
    """ModelError naming a tensor with a value that is not finite, or is not so in the type stored."""
    partial = path.with_name(path.name + ".tmp")
    with partial.open("wb") as file:
        file.write(_header(entries))
        for name, entry in entries.items():
            for piece in _pieces(name, entry):
                file.write(np.ascontiguousarray(piece).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def check_entry(name: str, entry: Entry) -> None:
    """What `write_shard` would refuse."""
    for _ in _pieces(name, entry):
        pass


def _pieces(name: str, entry: Entry) -> Iterator[npt.NDArray[Any]]:
    """The values in the type stored."""
    flat = entry.values.reshape(-1)
    for begin in range(0, flat.size, _PIECE):
        with np.errstate(over="ignore"):  # what becomes infinite is refused below
            piece = flat[begin : begin + _PIECE].astype(entry.dtype, copy=False)
        if piece.dtype.name in FLOATS and not is_finite(piece):
            raise ModelError(_not_finite(name, entry.dtype))
        yield piece


def read_header(path: Path) -> dict[str, int]:
    """Bytes of each tensor of a file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        table = json.loads(file.read(length))
    offsets = {name: entry["data_offsets"] for name, entry in table.items() if name != "__metadata__"}
    return {name: end - begin for name, (begin, end) in offsets.items()}


def _header(entries: Mapping[str, Entry]) -> bytes:
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, entry in entries.items():
        begin, end = end, end + entry.nbytes
        table[name] = {
            "dtype": _NAMES[entry.dtype.name],
            "shape": list(entry.values.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _not_finite(name: str, dtype: np.dtype[Any]) -> str:
    return (
        f"tensor {name!r} has values that are not finite in {dtype.name} (NaN, infinite or too large)."
        " Nothing was written."
    )
