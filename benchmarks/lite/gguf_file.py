"""A Hugging Face directory as a float16 GGUF file, for llama.cpp's tools.

    python benchmarks/lite/gguf_file.py MODEL_DIR LIKE.gguf OUT.gguf

Description and vocabulary are those of `LIKE.gguf`, a file of the same model; only the weights are the
directory's. Matrices are float16, vectors float32. Needs the package `gguf`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from lmdeploy.models.checkpoint import Checkpoint, Rows
from lmdeploy.models.registry import FAMILIES, open_checkpoint
from lmdeploy.quant.tensors import GroupedTensor

_OF_THE_WRITER = ("GGUF.", "general.architecture", "general.quantization_version", "general.file_type")


def write_gguf(directory: Path, like: Path, out: Path) -> Path:
    """`out` appears complete or not at all. ValueError for tensors that GGUF stacks."""
    reader = GGUFReader(like)
    partial = out.with_name(out.name + ".partial")
    writer = GGUFWriter(partial, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if not name.startswith(_OF_THE_WRITER):
            inner = field.types[1] if field.types[0] is GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for name, values in gguf_tensors(open_checkpoint(directory), open_checkpoint(like)):
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(out)
    return out


def gguf_tensors(weights: Checkpoint, like: Checkpoint) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Each tensor of `weights` under the name and in the row order of the GGUF file `like`."""
    table = {family.name: family.gguf_names for family in FAMILIES}[like.spec.family] or {}
    for canonical, _ in weights.spec.tensors():
        values = weights.read(canonical)
        if isinstance(values, GroupedTensor):
            raise ValueError(f"{weights.source}: is quantised already")
        stored = np.asarray(values, np.float32 if values.ndim == 1 else np.float16)
        _, *rest = canonical.split(".", 2) if canonical.startswith("layers.") else (canonical,)
        source = table[f"layers.{{i}}.{rest[1]}" if rest else canonical]
        rows = source.rows and source.rows(like.spec, int(rest[0]) if rest else 0)
        yield like.stored_name(canonical), _ordered(stored, rows)


def _ordered(values: npt.NDArray[Any], rows: Rows | None) -> npt.NDArray[Any]:
    """The inverse of selecting `rows`, which are all rows in another order."""
    if rows is None:
        return np.ascontiguousarray(values)
    if isinstance(rows, slice) or len(rows) != len(values):
        raise ValueError("several matrices share one tensor of the GGUF file")
    result = np.empty_like(values)
    result[rows] = values
    return result


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    for name in ("model", "like", "out"):
        parser.add_argument(name, type=Path)
    args = parser.parse_args()
    print(write_gguf(args.model, args.like, args.out))


if __name__ == "__main__":
    main()
