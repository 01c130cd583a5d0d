"""How far each layer of a model is from the original's, and each matrix of it.

Both models walk side by side over some of the held-out windows; memory holds one layer of each and the states
of these windows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lmdeploy.errors import ModelError
from lmdeploy.lite.walk import layer_weights
from lmdeploy.lite.workspace import RECORD
from lmdeploy.models.checkpoint import Checkpoint
from lmdeploy.models.files import is_there, read_json
from lmdeploy.quality.hidden import dense, layer_forward

Tell = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class MatrixFigures:
    """error: of its output over the calibration inputs where the quantisation said so (measured "output"),
    else of its values (measured "weights"), relative, squared. bytes: in the files."""

    name: str
    kind: str
    bits_per_weight: float
    bytes: int
    error: float
    measured: str


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """Relative squared errors. own: of what the layer adds, when both are fed the original's states. carried:
    of the states after it, each model fed its own."""

    index: int
    own: float
    carried: float
    bytes: int
    matrices: tuple[MatrixFigures, ...]


def comparable(original: Checkpoint, other: Checkpoint) -> str | None:
    """Why layers of the two cannot be compared, or None."""
    for name in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(original.spec, name), getattr(other.spec, name)
        if ours != theirs:
            return f"{name.replace('_', ' ')} is {theirs}, that of the original is {ours}"
    if list(original.spec.tensors()) != list(other.spec.tensors()):
        return "its layers have other shapes than the original's"
    return None


def layer_figures(
    original: Checkpoint, other: Checkpoint, windows: Sequence[Sequence[int]], tell: Tell = lambda *_: None
) -> list[LayerFigures]:
    """Of every layer of `other`; the two must be `comparable`."""
    count, saved = len(original.spec.layers), saved_errors(Path(other.source))
    longest = max(len(ids) for ids in windows)
    found = []
    with torch.no_grad():
        ours = _embedded(original, windows)
        theirs = _embedded(other, windows)
        for layer in range(count):
            mine, its = layer_weights(original, layer), layer_weights(other, layer)
            first = layer_forward(original, layer, longest, mine)
            second = layer_forward(other, layer, longest, its)
            own = carried = own_scale = carried_scale = 0.0
            for i, x in enumerate(ours):
                y, z = first(x), second(x)
                own += _square(z - y)
                own_scale += _square(y - x)
                ours[i], theirs[i] = y, second(theirs[i])
                carried += _square(theirs[i] - y)
                carried_scale += _square(y)
            matrices = _matrices(other, layer, mine, its, saved)
            size = sum(other.info(n).file_bytes for n in other.names() if n.startswith(f"layers.{layer}."))
            found.append(
                LayerFigures(layer, _ratio(own, own_scale), _ratio(carried, carried_scale), size, matrices)
            )
            tell(f"errors of layer {layer + 1} of {count}", layer + 1, count)
    return found


def saved_errors(path: Path) -> dict[tuple[int, str], float]:
    """By layer and matrix, as the quantisation that wrote folder `path` measured them; empty without one."""
    if not is_there(path / RECORD):
        return {}
    try:
        layers: list[dict[str, Any]] = read_json(path / RECORD).get("layers", [])
        return {
            (index, str(one["name"])): float(one["error"])
            for index, layer in enumerate(layers)
            for one in layer["matrices"]
        }
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ModelError(f"{path / RECORD} is not what a quantisation writes; remove it") from None


def _matrices(
    other: Checkpoint,
    layer: int,
    mine: Mapping[str, torch.Tensor],
    its: Mapping[str, torch.Tensor],
    saved: Mapping[tuple[int, str], float],
) -> tuple[MatrixFigures, ...]:
    found = []
    for linear in other.spec.linears(layer):
        name = linear.name.removeprefix(f"layers.{layer}.")
        info = other.info(f"{linear.name}.weight")
        error = saved.get((layer, name), saved.get((layer, linear.name)))
        measured = "weights" if error is None else "output"
        if error is None:
            a, b = mine[f"{name}.weight"], its[f"{name}.weight"]
            error = _ratio(_square(b - a), _square(a))
        bits = 8 * info.file_bytes / (info.shape[0] * info.shape[1])
        kind = f"{info.kind} {info.bits} bit" + (f", groups of {info.group_size}" if info.group_size else "")
        found.append(MatrixFigures(name, kind, bits, info.file_bytes, error, measured))
    return tuple(found)


def _embedded(model: Checkpoint, windows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    embedding = dense(model, "embed.weight")
    return [embedding[torch.tensor(ids)] * model.spec.embedding_scale for ids in windows]


def _square(x: torch.Tensor) -> float:
    return float(x.double().pow(2).sum())


def _ratio(value: float, scale: float) -> float:
    return value / scale if scale else 0.0
