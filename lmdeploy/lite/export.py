"""The result as a Hugging Face directory, one weight file for each layer, written as layers are finished.

Owns stored names: matrices that the source stores as one tensor are joined again, tensors that no layer has
are copied, tied embeddings stay one tensor. The directory is complete: what stood beside the weights comes
along. Knows no algorithm; layouts are the writer's.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lmdeploy.lite.problem import LayerResult, LinearReport
from lmdeploy.lite.shards import FLOATS, Entry, check_entry, read_header, write_shard
from lmdeploy.lite.workspace import write_json
from lmdeploy.models.checkpoint import Checkpoint, Rows
from lmdeploy.models.files import read_json
from lmdeploy.models.formats.writers import Writer
from lmdeploy.quant.scheme import WeightScheme
from lmdeploy.quant.tensors import GroupedTensor

Schemes = Mapping[str, WeightScheme | None]  # by canonical matrix name, None: kept
_SCALES = np.dtype(np.float16)
_WEIGHT_FILES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt"}
_NOT_COPIED = {"config.json", "quantize_config.json", "model.safetensors.index.json"}


class Export:
    """A `LayerSink`: a layer is finished, for later runs too, once its file is there."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        folder: Path,
        writer: Writer,
        schemes: Schemes,
        dtype: np.dtype[Any] | None = None,
    ) -> None:
        """folder: where the result grows; reports of layers are kept in its `work`. dtype: of tensors that
        stay floats, None: their own."""
        self._checkpoint, self._folder = checkpoint, folder
        self._writer, self._schemes, self._dtype = writer, schemes, dtype
        self._layers = len(checkpoint.spec.layers)

    def finished(self, layer: int) -> bool:
        return self._shard(layer + 1).exists()

    def put(self, layer: int, result: LayerResult) -> None:
        report = {"linears": [asdict(one) for one in result.linears], "notes": list(result.notes)}
        write_json(self._report(layer), report)
        names = [n for n in self._checkpoint.names() if n.startswith(f"layers.{layer}.")]
        self._write(self._shard(layer + 1), self._stored(names), result)

    def as_read(self, layer: int, result: LayerResult) -> dict[str, npt.NDArray[np.float32]]:
        """What a reader of the result computes with, of the tensors that changed."""
        values = {}
        for name, tensor in result.tensors.items():
            if isinstance(tensor, GroupedTensor):
                values[name] = tensor.dequantize()
            else:
                kind = self._checkpoint.info(f"layers.{layer}.{name}").kind
                values[name] = tensor.astype(self._float_type(FLOATS[kind])).astype(np.float32)
        return values

    def reports(self) -> list[tuple[list[LinearReport], list[str]]]:
        """Of every layer: its matrices, and notes."""
        read = [read_json(self._report(layer)) for layer in range(self._layers)]
        return [([LinearReport(**one) for one in r["linears"]], r["notes"]) for r in read]

    def finish(self, source: Path, outside: LayerResult) -> None:
        """All that belongs to no layer, the index, config.json, and the other files of folder `source`.

        outside: by canonical name, what of that was quantised.
        """
        names = [n for n in self._checkpoint.names() if not n.startswith("layers.")]
        stored = self._stored(names) | {name: [] for name in self._checkpoint.unread()}
        self._write(self._shard(0), stored, outside)
        placed = {
            name: (shard.name, nbytes)
            for shard in (self._shard(i) for i in range(self._layers + 1))
            for name, nbytes in read_header(shard).items()
        }
        total = sum(nbytes for _, nbytes in placed.values())
        index = {
            "metadata": {"total_size": total},
            "weight_map": {n: s for n, (s, _) in sorted(placed.items())},
        }
        write_json(self._folder / "model.safetensors.index.json", index)
        write_json(self._folder / "config.json", self._config(source))
        for file, place in files_beside(source, self._folder):
            (self._folder / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, self._folder / place)

    def module_schemes(self) -> dict[str, WeightScheme | None]:
        """Of every matrix by its module's name in the files."""
        return stored_schemes(self._checkpoint, self._schemes)

    def _config(self, source: Path) -> dict[str, Any]:
        config = read_json(source / "config.json")
        config["quantization_config"] = self._writer.config(self.module_schemes())
        if self._dtype is not None:
            for key in {"torch_dtype", "dtype"} & config.keys() or {"torch_dtype"}:
                config[key] = self._dtype.name
        return config

    def _shard(self, number: int) -> Path:
        return self._folder / f"model-{number + 1:05d}-of-{self._layers + 1:05d}.safetensors"

    def _report(self, layer: int) -> Path:
        return self._folder / "work" / f"layer-{layer:05d}.json"

    def _stored(self, names: Sequence[str]) -> dict[str, list[tuple[str, Rows | None]]]:
        """The files' tensors that hold these, each with its parts."""
        found: dict[str, list[tuple[str, Rows | None]]] = {}
        for name in sorted(names):
            stored, rows = self._checkpoint.placement(name)
            found.setdefault(stored, []).append((name, rows))
        return dict(sorted(found.items()))

    def _write(
        self, shard: Path, stored: Mapping[str, list[tuple[str, Rows | None]]], result: LayerResult
    ) -> None:
        entries: dict[str, Entry] = {}
        for name, parts in stored.items():
            entries.update(self._entries(name, parts, result))
        write_shard(shard, entries)
        for name in stored:
            self._checkpoint.release_stored(name)

    def _entries(
        self, stored: str, parts: list[tuple[str, Rows | None]], result: LayerResult
    ) -> Iterator[tuple[str, Entry]]:
        changed = [result.tensors.get(_local(name)) for name, _ in parts]
        old = self._checkpoint.read_stored(stored)
        assert not isinstance(old, GroupedTensor)
        if all(one is None for one in changed):
            yield stored, Entry(old, self._float_type(old.dtype))
            return
        rows = [rows for _, rows in parts]
        if any(isinstance(one, GroupedTensor) for one in changed):
            whole = joined(changed, rows)
            scheme = self._schemes[parts[0][0].removesuffix(".weight")]
            assert scheme is not None
            for last, values in self._writer.encode(whole, scheme.symmetric, _SCALES).items():
                yield f"{stored.removesuffix('.weight')}.{last}", Entry(values, values.dtype)
            return
        values = np.array(old, np.float32)
        for one, some in zip(changed, rows, strict=True):
            if one is not None:
                values[slice(None) if some is None else some] = one
        yield stored, Entry(values, self._float_type(old.dtype))

    def _float_type(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        return _float_type(dtype, self._dtype)


def _float_type(dtype: np.dtype[Any], wanted: np.dtype[Any] | None) -> np.dtype[Any]:
    floats = dtype.name in ("float64", "float32", "float16", "bfloat16")
    return dtype if wanted is None or not floats else wanted


def check_copied(checkpoint: Checkpoint, schemes: Schemes, dtype: np.dtype[Any] | None) -> None:
    """ModelError naming a tensor that belongs to no layer and cannot be written at the end: a value is not
    finite, or is not so in the type it would be stored in."""
    names = {checkpoint.stored_name(n): n for n in checkpoint.names() if not n.startswith("layers.")}
    for stored in (*sorted(names), *checkpoint.unread()):
        values = checkpoint.read_stored(stored)
        assert not isinstance(values, GroupedTensor)
        rounded = schemes.get(names.get(stored, "").removesuffix(".weight")) is not None
        check_entry(stored, Entry(values, values.dtype if rounded else _float_type(values.dtype, dtype)))
        checkpoint.release_stored(stored)


def joined(
    parts: Sequence[GroupedTensor | npt.NDArray[np.float32] | None], rows: Sequence[Rows | None]
) -> GroupedTensor:
    """The matrix that a file stores as one, of its parts and which rows each is."""
    tensors = [part for part in parts if isinstance(part, GroupedTensor)]
    assert len(tensors) == len(parts) and len({(t.bits, t.group_size) for t in tensors}) == 1
    if len(tensors) == 1 and rows[0] is None:
        return tensors[0]
    total = sum(tensor.shape[0] for tensor in tensors)

    def place(values: Sequence[Any]) -> Any:
        if values[0] is None:
            return None
        whole = np.empty((total, *values[0].shape[1:]), values[0].dtype)
        for value, some in zip(values, rows, strict=True):
            whole[slice(None) if some is None else some] = value
        return whole

    return GroupedTensor(
        tensors[0].bits,
        tensors[0].group_size,
        place([t.codes for t in tensors]),
        place([t.scales for t in tensors]),
        place([t.zeros for t in tensors]),
        place([t.mins for t in tensors]),
        tensors[0].order,  # of their common inputs
    )


def stored_schemes(checkpoint: Checkpoint, schemes: Schemes) -> dict[str, WeightScheme | None]:
    """By module as the files call it; those of one module must agree. The output matrix is among them."""
    found: dict[str, WeightScheme | None] = {}
    for name, scheme in schemes.items():
        module = checkpoint.placement(f"{name}.weight")[0].removesuffix(".weight")
        assert found.get(module, scheme) == scheme
        found[module] = scheme
    return found


def files_beside(source: Path, *without: Path) -> list[tuple[Path, Path]]:
    """Everything in folder `source` that is no weights and not hidden: (file, its place)."""
    found = []
    for file in sorted(source.rglob("*")):
        place = file.relative_to(source)
        hidden = any(part.startswith(".") for part in place.parts)
        weights = file.suffix in _WEIGHT_FILES or file.name.endswith(".index.json")
        inside = any(file.resolve().is_relative_to(folder.resolve()) for folder in without)
        if file.is_file() and not (hidden or weights or inside or str(place) in _NOT_COPIED):
            found.append((file, place))
    return found


def result_bytes(checkpoint: Checkpoint, schemes: Schemes, dtype: np.dtype[Any] | None) -> int:
    """How much the weight files will take, a little more rather than less."""
    total = 1 << 20
    for name in checkpoint.names():
        info = checkpoint.info(name)
        scheme = schemes.get(name.removesuffix(".weight"))
        if scheme is None:
            total += info.file_bytes if dtype is None else _values(info.shape) * dtype.itemsize
        else:
            total += int(_values(info.shape) * (scheme.bits_per_weight(info.shape[1]) + 0.5) / 8) + 4096
    return total + sum(np.asarray(checkpoint.read_stored(name)).nbytes for name in checkpoint.unread())


def _values(shape: Sequence[int]) -> int:
    return int(np.prod(shape))


def _local(name: str) -> str:
    return name.split(".", 2)[2] if name.startswith("layers.") else name
