"""One quantisation from a model's directory to a new one: checks, the walk, the export.

Owns what makes two runs the same job, and the order in which things are refused: before anything is computed.
Knows no flag and no terminal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lmdeploy.errors import ConfigError
from lmdeploy.lite.export import Export, Schemes, files_beside, result_bytes, stored_schemes
from lmdeploy.lite.methods import quantiser
from lmdeploy.lite.problem import LinearReport
from lmdeploy.lite.recipe import Recipe
from lmdeploy.lite.shards import FLOATS
from lmdeploy.lite.walk import Walk
from lmdeploy.lite.workspace import Workspace
from lmdeploy.models.checkpoint import Checkpoint
from lmdeploy.models.files import locate
from lmdeploy.models.formats.writers import WRITERS, Writer
from lmdeploy.models.packed import is_packed
from lmdeploy.models.registry import open_checkpoint
from lmdeploy.quant.scheme import WHOLE_ROW, WeightScheme

Tell = Callable[[str, int, int], None]
Windows = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Calibration:
    """windows: token ids of each. described: what they were made of, as JSON values."""

    windows: Windows = ()
    described: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Output:
    """Where the result goes and how it is written. dtype: a name in `shards.FLOATS`, None: the source's."""

    directory: Path
    format: str = "awq"
    dtype: str | None = None
    force: bool = False


@dataclass(frozen=True, slots=True)
class Done:
    """layers: of each the matrices, and notes. bits_per_weight: over all quantised matrices. sizes: bytes of
    weight files, before and after. resumed: whether some layers were there from an earlier run."""

    directory: Path
    layers: tuple[tuple[list[LinearReport], list[str]], ...]
    bits_per_weight: float
    source_bytes: int
    bytes: int
    notes: tuple[str, ...]
    resumed: bool


@contextmanager
def opened(source: Path) -> Iterator[Checkpoint]:
    """The model to compress. ConfigError when its weights are not plain floats of a directory."""
    if is_packed(source):
        raise ConfigError(f"{source} is in packed form; give the model's own directory")
    if locate(source).format == "gguf":
        raise ConfigError(
            f"{source} is a GGUF file; quantising starts from a Hugging Face directory with float weights"
        )
    checkpoint = open_checkpoint(source)
    try:
        if checkpoint.model_format != "hf":
            raise ConfigError(
                f"{source} is quantised already ({checkpoint.model_format}); give the original model"
            )
        yield checkpoint
    finally:
        checkpoint.close()


def quantise_model(
    source: Path, recipe: Recipe, calibration: Calibration, output: Output, tell: Tell, device: str = "cpu"
) -> Done:
    """Write the quantised model. ConfigError, CapacityError, ModelError: then nothing is left of it."""
    with opened(source) as checkpoint:
        writer, dtype = WRITERS[output.format], FLOATS[output.dtype] if output.dtype else None
        schemes, notes = settled_schemes(checkpoint, recipe, writer)
        job = _job(checkpoint, recipe, calibration, output)
        with Workspace(output.directory, job, force=output.force) as workspace:
            workspace.check_space(_space(checkpoint, schemes, calibration.windows, source, dtype))
            export = Export(checkpoint, workspace.partial, writer, schemes, dtype)
            walk = Walk(checkpoint, calibration.windows, workspace.work, tell, device=device)
            walk.run(quantiser(recipe), schemes, export)
            layers = tuple(export.reports())
            export.finish(source)
            done = Done(
                output.directory,
                layers,
                _bits(checkpoint, schemes),
                sum(checkpoint.info(name).file_bytes for name in checkpoint.names()),
                sum(file.stat().st_size for file in workspace.partial.glob("*.safetensors")),
                (*checkpoint.notes, *notes),
                workspace.resumed,
            )
            workspace.finish({**job, "bits_per_weight": done.bits_per_weight, "layers": _saved(layers)})
    return done


def settled_schemes(
    checkpoint: Checkpoint, recipe: Recipe, writer: Writer
) -> tuple[dict[str, WeightScheme | None], list[str]]:
    """Of every matrix of every layer; what the format cannot hold stays as it is. And what is to be said."""
    spec, schemes = checkpoint.spec, dict[str, WeightScheme | None]()
    for layer in range(len(spec.layers)):
        schemes.update({linear.name: recipe.scheme for linear in spec.linears(layer)})
    notes = _shorter_groups(checkpoint, schemes)
    refused: dict[str, list[str]] = {}
    for module, scheme in stored_schemes(checkpoint, schemes).items():
        shape = _matrix_shape(np.shape(checkpoint.read_stored(f"{module}.weight")))
        reason = None if scheme is None else writer.refusal(scheme, shape)
        if reason is not None:
            refused.setdefault(reason, []).append(module)
    for reason, modules in refused.items():
        notes.append(f"{writer.name} {reason}: {_some(modules)} kept as they are")
        for name in schemes:
            if checkpoint.placement(f"{name}.weight")[0].removesuffix(".weight") in modules:
                schemes[name] = None
    if not any(schemes.values()):
        reason = next(iter(refused))
        raise ConfigError(f"no matrix can be written in the format {writer.name}, which {reason}")
    if not spec.tie_embeddings:
        schemes["lm_head"] = None
    return schemes, notes


def _shorter_groups(checkpoint: Checkpoint, schemes: Schemes) -> list[str]:
    uneven: dict[int, int] = {}
    for name, scheme in schemes.items():
        inputs = checkpoint.info(f"{name}.weight").shape[1]
        if scheme is not None and scheme.group_size != WHOLE_ROW and inputs % scheme.group_size:
            uneven[inputs] = scheme.group_size
    return [
        f"{inputs} inputs are no multiple of {group}: the last group of each channel holds"
        f" {inputs % group if inputs > group else inputs}; readers that want whole groups refuse such files"
        for inputs, group in uneven.items()
    ]


def _matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    n, k = shape
    return n, k


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _space(
    checkpoint: Checkpoint, schemes: Schemes, windows: Windows, source: Path, dtype: np.dtype[Any] | None
) -> int:
    """Bytes on disk while the result is made: it, what comes along, hidden states of two layers."""
    states = 2 * 4 * checkpoint.spec.hidden_size * sum(len(ids) for ids in windows)
    beside = sum(file.stat().st_size for file, _ in files_beside(source))
    return result_bytes(checkpoint, schemes, dtype) + states + beside


def _job(
    checkpoint: Checkpoint, recipe: Recipe, calibration: Calibration, output: Output
) -> dict[str, Any]:
    digest = hashlib.sha256()
    for ids in calibration.windows:
        digest.update(np.asarray(ids, np.int64).tobytes() + b";")
    files = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in checkpoint.files}
    return {
        "source": {"path": checkpoint.source, "files": files},
        "recipe": asdict(recipe),
        "data": {**calibration.described, "sha256": digest.hexdigest()},
        "format": output.format,
        "dtype": output.dtype,
    }


def _bits(checkpoint: Checkpoint, schemes: Schemes) -> float:
    """Mean over all weights that are quantised."""
    bits, values = 0.0, 0
    for name, scheme in schemes.items():
        if scheme is not None:
            n, k = checkpoint.info(f"{name}.weight").shape
            bits, values = bits + n * k * scheme.bits_per_weight(k), values + n * k
    return bits / values


def _saved(layers: Sequence[tuple[list[LinearReport], list[str]]]) -> list[dict[str, Any]]:
    return [{"matrices": [asdict(one) for one in linears], "notes": notes} for linears, notes in layers]
