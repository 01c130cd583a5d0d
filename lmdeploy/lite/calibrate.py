"""Statistics only: what each matrix of an unchanged model is fed, one file for each layer.

A file `layer-00003.safetensors` holds for each matrix `X.mean_abs`, `X.max_abs` and `X.mean_square` (the
diagonal of the gram matrix), float32 by input, over all calibration tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lmdeploy.lite.job import Calibration, Tell, check_vectors, opened, source_of
from lmdeploy.lite.problem import LayerProblem, LayerResult
from lmdeploy.lite.shards import FLOATS, Entry, write_shard
from lmdeploy.lite.walk import Walk
from lmdeploy.lite.workspace import Workspace


def calibrate(
    source: Path,
    calibration: Calibration,
    directory: Path,
    tell: Tell,
    force: bool = False,
    device: str = "cpu",
    at_once: int | None = None,
) -> None:
    """Write the statistics. Errors as `job.quantise_model`."""
    with opened(source) as checkpoint:
        check_vectors(checkpoint)
        job = {**source_of(checkpoint, calibration, tell), "kind": "statistics"}
        windows, spec = calibration.windows, checkpoint.spec
        with Workspace(directory, job, force=force) as workspace:
            workspace.check_space(2 * 4 * spec.hidden_size * sum(len(ids) for ids in windows) + (64 << 20))
            sink = _Statistics(workspace.partial)
            walk = Walk(checkpoint, windows, workspace.work, tell, device=device, at_once=at_once)
            walk.run(sink.quantise, {}, sink)
            workspace.finish(job)


class _Statistics:
    """A `LayerSink` that keeps what the walk gathered; nothing of the model changes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._entries: dict[str, Entry] = {}

    def quantise(self, problem: LayerProblem) -> LayerResult:
        self._entries = {}
        for name, stats in problem.stats.items():
            values = {
                "mean_abs": stats.mean_abs,
                "max_abs": stats.max_abs,
                "mean_square": stats.gram.diagonal().contiguous(),
            }
            for what, one in values.items():
                self._entries[f"{name}.{what}"] = Entry(one.cpu().numpy(), FLOATS["float32"])
        return LayerResult({})

    def finished(self, layer: int) -> bool:
        return self._path(layer).exists()

    def put(self, layer: int, result: LayerResult) -> None:
        write_shard(self._path(layer), self._entries)

    def as_read(self, layer: int, result: LayerResult) -> Mapping[str, npt.NDArray[np.float32]]:
        return {}

    def _path(self, layer: int) -> Path:
        return self._folder / f"layer-{layer:05d}.safetensors"
