"""Weights of a Hugging Face directory: one model.safetensors or shards with an index, memory-mapped.

Float32, float16 and bfloat16 only, without torch. Knows tensor names as the files spell them, no family.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (first: it registers bfloat16 with NumPy)
import numpy as np
from safetensors import SafetensorError, safe_open

from lmdeploy.errors import ModelError
from lmdeploy.models.checkpoint import TensorInfo
from lmdeploy.models.files import read_json
from lmdeploy.models.gguf import TensorKind
from lmdeploy.quant.tensors import Tensor

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_KINDS: dict[str, tuple[TensorKind, int]] = {
    "F32": ("float32", 32),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
}


class SafetensorsStore:
    """All tensors of a directory. Opening maps the files and reads their headers."""

    def __init__(self, directory: Path) -> None:
        self.source = str(directory)
        self._shards: dict[str, Any] = {}
        self._info: dict[str, TensorInfo] = {}
        for shard, names in _shards(directory).items():
            self._open(shard, names)

    def _open(self, shard: Path, expected: set[str] | None) -> None:
        if not shard.is_file():
            raise ModelError(f"{shard}: a weight file that {_INDEX} names is missing; fetch the model again.")
        try:
            handle: Any = safe_open(str(shard), framework="np")
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{shard}: not a sound safetensors file ({error}); it may be cut off: fetch it again."
            ) from None
        names = set(handle.keys())
        for name in sorted((expected or names) - names):
            raise ModelError(f"{shard}: tensor {name!r} is missing, although {_INDEX} places it there.")
        for name in names:
            if name in self._shards:
                raise ModelError(f"{shard}: tensor {name!r} occurs in a second weight file too.")
            self._shards[name] = handle
            self._info[name] = _info(shard, name, handle.get_slice(name))

    def names(self) -> Iterable[str]:
        return self._info.keys()

    def info(self, name: str) -> TensorInfo:
        return self._info[name]

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._shards[name].get_tensor(name)
        return tensor

    def close(self) -> None:
        self._shards.clear()


def _shards(directory: Path) -> dict[Path, set[str] | None]:
    """Weight file -> the tensors the index places in it (None without an index)."""
    if not (directory / _INDEX).is_file():
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
    files = sorted(directory.glob("*.safetensors"))
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


def _info(shard: Path, name: str, piece: Any) -> TensorInfo:
    kind = piece.get_dtype()
    if kind not in _KINDS:
        supported = ", ".join(_KINDS)
        raise ModelError(
            f"{shard}: tensor {name!r} is of kind {kind}, which is not supported (supported: {supported})."
        )
    shape = tuple(int(extent) for extent in piece.get_shape())
    yields, bits = _KINDS[kind]
    return TensorInfo(shape, yields, bits, 0, int(np.prod(shape, dtype=np.int64)) * bits // 8)
