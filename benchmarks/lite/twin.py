"""A model's grid-free twin: the same function, other weights.  usage: twin.py MODEL_DIR OUT_DIR [--seed 0]

Weights that come from a 4-bit file sit on that file's grid, which flatters a quantiser that finds it again.
Random positive scales of channels, log-uniform in [0.8, 1.25], move them off it: from a norm into the
matrices it feeds, from up to down, from v to o (one scale for each value channel of a key-value head, which
all its query heads share). Which matrices those are follows from the model's spec. In exact arithmetic the
logits are unchanged; how close they are in float32 is tested. Needs no torch.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes  # noqa: F401  (registers bfloat16)
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from lmdeploy.models.checkpoint import Checkpoint
from lmdeploy.models.registry import open_checkpoint
from lmdeploy.models.spec import LinearSpec, ModelSpec
from lmdeploy.quant.tensors import GroupedTensor

F32 = npt.NDArray[np.float32]
LOW, HIGH = 0.8, 1.25
WEIGHTS = (".safetensors", ".gguf", ".index.json")


def make_twin(source: Path, target: Path, seed: int = 0, dtype: str = "float16") -> Path:
    """Writes the twin of the directory `source` to `target`, which appears complete or not at all.

    dtype: of the weights written. ValueError for a model whose tensors are fused or quantised.
    """
    checkpoint = open_checkpoint(source)
    tensors = dict(twin_tensors(checkpoint, seed))
    stored = {checkpoint.stored_name(name): values.astype(dtype) for name, values in tensors.items()}
    if len(stored) != len(tensors):
        raise ValueError(f"{source}: several matrices share one tensor; twins of such models are not made")
    checkpoint.close()
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial, ignore=lambda _, names: [x for x in names if x.endswith(WEIGHTS)])
    save_file(stored, partial / "model.safetensors", {"format": "pt"})
    partial.replace(target)
    return target


def twin_tensors(checkpoint: Checkpoint, seed: int) -> Iterator[tuple[str, F32]]:
    """(canonical name, values) of every tensor of the twin, in the order of the spec."""
    rows, columns = channel_scales(checkpoint.spec, np.random.default_rng(seed))
    offset = checkpoint.spec.norm.offset
    for name, _ in checkpoint.spec.tensors():
        values = checkpoint.read(name)
        if isinstance(values, GroupedTensor):
            raise ValueError(f"{checkpoint.source}: is quantised already; a twin is made of float weights")
        module, kind = name.rsplit(".", 1)
        result: npt.NDArray[np.float64] = values.astype(np.float64)
        if module in rows:
            shift = offset if result.ndim == 1 and kind == "weight" else 0.0
            scales = rows[module] if result.ndim == 1 else rows[module][:, None]
            result = (result + shift) * scales - shift
        if module in columns and kind == "weight":
            result = result / columns[module]
        yield name, result.astype(np.float32)


Scales = dict[str, npt.NDArray[np.float64]]  # by canonical name of a norm or a matrix


def channel_scales(spec: ModelSpec, random: np.random.Generator) -> tuple[Scales, Scales]:
    """What outputs are multiplied by, and what inputs are divided by."""
    rows: Scales = {}
    columns: Scales = {}
    for i, layer in enumerate(spec.layers):
        for linear in spec.linears(i):
            if not linear.fed_by.endswith(("_norm", "_proj")):
                continue  # without a norm before it there is nothing to take up the scale
            if linear.fed_by not in rows:
                rows[linear.fed_by] = _draw(random, _width(spec, i, linear))
            scales = rows[linear.fed_by]
            if linear.name.endswith("attn.o_proj"):
                heads = layer.attention
                each = scales.reshape(heads.num_kv_heads, heads.head_dim)
                scales = each.repeat(heads.num_heads // heads.num_kv_heads, axis=0).reshape(-1)
            columns[linear.name] = scales
    return rows, columns


def _width(spec: ModelSpec, layer: int, linear: LinearSpec) -> int:
    attention = spec.layers[layer].attention
    if linear.name.endswith("attn.o_proj"):
        return attention.num_kv_heads * attention.head_dim
    return linear.in_features


def _draw(random: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
    return np.exp(random.uniform(np.log(LOW), np.log(HIGH), count))


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float16", "float32"), default="float16")
    args = parser.parse_args()
    if args.out.exists():
        sys.exit(f"{args.out} is there already")
    make_twin(args.model, args.out, args.seed, args.dtype)
    print(f"{args.out}: twin of {args.model}, seed {args.seed}, {args.dtype}")


if __name__ == "__main__":
    main()
