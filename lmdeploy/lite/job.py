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
import torch

from lmdeploy import __version__
from lmdeploy.errors import ConfigError
from lmdeploy.lite.export import Export, Schemes, check_copied, files_beside, result_bytes
from lmdeploy.lite.methods import quantiser
from lmdeploy.lite.mixed import mixed_schemes
from lmdeploy.lite.outside import outside_result
from lmdeploy.lite.problem import LinearReport
from lmdeploy.lite.recipe import Recipe
from lmdeploy.lite.schemes import holds, plan_of
from lmdeploy.lite.shards import FLOATS
from lmdeploy.lite.walk import Walk
from lmdeploy.lite.workspace import Workspace, check_output, write_json
from lmdeploy.models.checkpoint import Checkpoint
from lmdeploy.models.files import locate, read_json
from lmdeploy.models.formats.writers import WRITERS, Writer
from lmdeploy.models.packed import is_packed
from lmdeploy.models.registry import open_checkpoint
from lmdeploy.quant.scheme import WeightScheme

Tell = Callable[[str, int, int], None]
Windows = Sequence[Sequence[int]]
_PIECE = 1 << 22  # bytes read at once


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
    """layers: of each the matrices, and notes. bits_per_weight: over the matrices of all
    layers. sizes: bytes of weight files, before and after. resumed: whether some layers were there from an
    earlier run."""

    directory: Path
    layers: tuple[tuple[list[LinearReport], list[str]], ...]
    bits_per_weight: float
    source_bytes: int
    bytes: int
    notes: tuple[str, ...]
    resumed: bool


def check_device(device: str) -> None:
    """ConfigError when torch cannot compute there."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA card here; leave it out to compute on the CPU")


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


def check_job(source: Path, recipe: Recipe, output: Output) -> None:
    """All that can be refused before any text is read. ConfigError, ModelError."""
    check_output(output.directory, output.force)
    with opened(source) as checkpoint:
        plan_of(checkpoint, recipe, WRITERS[output.format])


def check_vectors(checkpoint: Checkpoint) -> None:
    """ModelError for a value that is not finite in a norm or bias: else found when its layer's turn comes."""
    for name in sorted(checkpoint.names()):
        if len(checkpoint.info(name).shape) == 1:
            checkpoint.read(name)
            checkpoint.release(name)


def quantise_model(
    source: Path,
    recipe: Recipe,
    calibration: Calibration,
    output: Output,
    tell: Tell,
    device: str = "cpu",
    at_once: int | None = None,
) -> Done:
    """Write the quantised model. ConfigError, CapacityError, ModelError: then nothing is left of it.

    tell, device, at_once: as `Walk` takes them.
    """
    with opened(source) as checkpoint:
        writer, dtype = WRITERS[output.format], FLOATS[output.dtype] if output.dtype else None
        plan = plan_of(checkpoint, recipe, writer)
        schemes, outside, notes = plan.schemes, plan.outside, plan.notes
        check_vectors(checkpoint)
        check_copied(checkpoint, schemes | outside, dtype)
        job = _job(checkpoint, recipe, calibration, output, tell)
        with Workspace(output.directory, job, force=output.force) as workspace:
            planned = schemes | outside
            workspace.check_space(_space(checkpoint, planned, calibration.windows, source, dtype))
            if recipe.keep or recipe.target_bpw is not None:
                settle = _Settle(checkpoint, recipe, writer, workspace.work, tell)
                schemes, line = settle.schemes(schemes, calibration.windows)
                notes.append(line)
            schemes |= outside
            if not any(schemes.values()):
                raise ConfigError("every matrix would stay as it is: ask for fewer bits")
            export = Export(checkpoint, workspace.partial, writer, schemes, dtype)
            walk = Walk(checkpoint, calibration.windows, workspace.work, tell, device=device, at_once=at_once)
            walk.run(quantiser(recipe), schemes, export)
            layers = tuple(export.reports())
            rounded = outside_result(checkpoint, outside)
            notes.extend(_outside_note(one, checkpoint) for one in rounded.linears)
            export.finish(source, rounded)
            done = Done(
                output.directory,
                layers,
                _bits(checkpoint, schemes),
                sum(checkpoint.info(name).file_bytes for name in checkpoint.names()),
                sum(file.stat().st_size for file in workspace.partial.glob("*.safetensors")),
                (*checkpoint.notes, *notes),
                workspace.resumed,
            )
            workspace.finish(
                {
                    **job,
                    "bits_per_weight": done.bits_per_weight,
                    "notes": done.notes,
                    "layers": _saved(layers),
                }
            )
    return done


def _outside_note(report: LinearReport, checkpoint: Checkpoint) -> str:
    name, embedding = checkpoint.stored_name(f"{report.name}.weight"), report.name == "embed"
    both = ", also the output matrix," if embedding and checkpoint.spec.tie_embeddings else ""
    alone = "; readers other than LMDeploy may refuse it" if embedding else ""
    return f"{name}{both} in 8 bits: squared error {report.error:.1e} of it{alone}"


@dataclass(frozen=True, slots=True)
class _Settle:
    """Mixed precision, measured once: a run that goes on finds what was settled."""

    checkpoint: Checkpoint
    recipe: Recipe
    writer: Writer
    folder: Path
    tell: Tell

    def schemes(
        self, even: dict[str, WeightScheme | None], windows: Windows
    ) -> tuple[dict[str, WeightScheme | None], str]:
        path = self.folder / "schemes.json"
        if not path.exists():
            fits = holds(self.checkpoint, self.writer)
            chosen, line = mixed_schemes(self.checkpoint, windows, self.recipe, even, fits, self.tell)
            saved = {name: None if s is None else asdict(s) for name, s in self._agreed(chosen).items()}
            write_json(path, {"schemes": saved, "line": line})
        value = read_json(path)
        return {n: None if s is None else WeightScheme(**s) for n, s in value["schemes"].items()}, value[
            "line"
        ]

    def _agreed(self, schemes: Schemes) -> Schemes:
        """Matrices that the files store as one get the scheme of fewest bits among theirs."""
        least: dict[str, tuple[float, WeightScheme | None]] = {}
        for name, scheme in schemes.items():
            inputs = self.checkpoint.info(f"{name}.weight").shape[1]
            bits = 16.0 if scheme is None else scheme.bits_per_weight(inputs)
            stored = self.checkpoint.stored_name(f"{name}.weight")
            if stored not in least or bits < least[stored][0]:
                least[stored] = bits, scheme
        return {name: least[self.checkpoint.stored_name(f"{name}.weight")][1] for name in schemes}


def _space(
    checkpoint: Checkpoint, schemes: Schemes, windows: Windows, source: Path, dtype: np.dtype[Any] | None
) -> int:
    """Bytes on disk while the result is made: it, what comes along, hidden states of two layers."""
    states = 2 * 4 * checkpoint.spec.hidden_size * sum(len(ids) for ids in windows)
    beside = sum(file.stat().st_size for file, _ in files_beside(source))
    return result_bytes(checkpoint, schemes, dtype) + states + beside


def source_of(checkpoint: Checkpoint, calibration: Calibration, tell: Tell) -> dict[str, Any]:
    """Model and text, as far as they decide a result; wherever the model is."""
    digest = hashlib.sha256()
    for ids in calibration.windows:
        digest.update(np.asarray(ids, np.int64).tobytes() + b";")
    return {
        "lmdeploy": __version__,
        "source": {"files": _contents(checkpoint.files, tell)},
        "data": {**calibration.described, "ids": digest.hexdigest()},
    }


def _contents(files: Sequence[Path], tell: Tell) -> dict[str, dict[str, Any]]:
    """Size and hash of each file, by its name."""
    total, done, found = sum(file.stat().st_size for file in files), 0, {}
    for file in files:
        digest, size = hashlib.sha256(), 0
        with file.open("rb") as stream:
            while piece := stream.read(_PIECE):
                digest.update(piece)
                size += len(piece)
                tell("reading the model's files", done + size, total)
        found[file.name] = {"bytes": size, "sha256": digest.hexdigest()}
        done += size
    return found


def _job(
    checkpoint: Checkpoint, recipe: Recipe, calibration: Calibration, output: Output, tell: Tell
) -> dict[str, Any]:
    return {
        **source_of(checkpoint, calibration, tell),
        "recipe": asdict(recipe),
        "format": output.format,
        "dtype": output.dtype,
    }


def _bits(checkpoint: Checkpoint, schemes: Schemes) -> float:
    """Mean over all weights of the layers' matrices, with 16 for those that stay as they are."""
    bits, values = 0.0, 0
    for name, scheme in schemes.items():
        if name.startswith("layers."):
            n, k = checkpoint.info(f"{name}.weight").shape
            bits += n * k * (16 if scheme is None else scheme.bits_per_weight(k))
            values += n * k
    return bits / values


def _saved(layers: Sequence[tuple[list[LinearReport], list[str]]]) -> list[dict[str, Any]]:
    return [{"matrices": [asdict(one) for one in linears], "notes": notes} for linears, notes in layers]
