"""Quantises a model layer by layer: memory holds one layer, its statistics and one window.

Owns the order of things: hidden states of all windows, statistics, the algorithm, hidden states of the next
layer computed with what the algorithm returned (so that later layers see and can mend earlier errors). Knows
no rounding and no file of the result: `Quantise` and `LayerSink` do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from lmdeploy.errors import ModelError
from lmdeploy.lite.forward import LayerForward
from lmdeploy.lite.problem import LayerProblem, LayerResult, Quantise
from lmdeploy.lite.states import HiddenStates
from lmdeploy.lite.stats import StatsGatherer
from lmdeploy.models.checkpoint import Checkpoint
from lmdeploy.quant.scheme import WeightScheme
from lmdeploy.quant.tensors import GroupedTensor

SAMPLE_TOKENS = 4096
TOKENS_AT_ONCE = 2048  # more gain nothing, fewer leave the matrix products a quarter slower
Schemes = Mapping[str, WeightScheme | None]  # by canonical matrix name, None: kept


class LayerSink(Protocol):
    """Where results go."""

    def finished(self, layer: int) -> bool:
        """Whether it was put there, by this run or by an earlier one with the same job."""

    def put(self, layer: int, result: LayerResult) -> None: ...
    def as_read(self, layer: int, result: LayerResult) -> Mapping[str, npt.NDArray[np.float32]]:
        """The values that a reader of the result computes with, of the tensors that changed."""


class Walk:
    """Over the layers of `checkpoint` with the calibration windows `windows` (ids of each)."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        windows: Sequence[Sequence[int]],
        folder: Path,
        tell: Callable[[str, int, int], None],
        *,
        device: str = "cpu",
        at_once: int | None = None,
    ) -> None:
        """folder: for hidden states. tell: a step ("layer 3: statistics"), how much of all work is done, and
        how much there is, in windows of a layer. device: where layers are computed, as torch names it.
        at_once: windows that are computed together, None: as many as TOKENS_AT_ONCE hold."""
        length = max((len(ids) for ids in windows), default=1)
        self._checkpoint, self._spec = checkpoint, checkpoint.spec.for_length(length)
        self._windows, self._folder, self._device = windows, folder, device
        self._batches = _batches([len(ids) for ids in windows], at_once or max(1, TOKENS_AT_ONCE // length))
        self._tell, self._done = tell, 0
        self._work = 2 * len(windows) * len(self._spec.layers)

    def run(self, quantise: Quantise, schemes: Schemes, sink: LayerSink) -> None:
        """Every layer that `sink` does not have already. ModelError names layer and step when something is
        not finite."""
        for layer in range(len(self._spec.layers)):
            if sink.finished(layer):
                self._advance(f"layer {layer}: done before", 2 * len(self._windows))
            else:
                with torch.no_grad():
                    self._layer(layer, quantise, schemes, sink)
            self._path(layer).unlink(missing_ok=True)

    def _layer(self, layer: int, quantise: Quantise, schemes: Schemes, sink: LayerSink) -> None:
        """The states of the next layer are there before the layer counts as finished."""
        weights = layer_weights(self._checkpoint, layer, self._device)
        problem = self._problem(layer, weights, schemes)
        self._advance(f"layer {layer}: quantising", 0)
        result = quantise(problem)
        del problem
        _check_result(layer, result)
        if layer + 1 < len(self._spec.layers) and self._windows:
            for name, values in sink.as_read(layer, result).items():
                weights[name] = torch.from_numpy(values).to(self._device)
            self._next_states(layer, weights)
        else:
            self._advance(f"layer {layer}: done", len(self._windows))
        sink.put(layer, result)

    def _problem(self, layer: int, weights: dict[str, torch.Tensor], schemes: Schemes) -> LayerProblem:
        prefix = f"layers.{layer}."
        gatherer = StatsGatherer(self._spec, layer)
        sample = self._observe(layer, weights, gatherer) if self._windows else []
        return LayerProblem(
            spec=self._spec,
            index=layer,
            weights=weights,
            stats=gatherer.stats(),
            schemes={n.removeprefix(prefix): s for n, s in schemes.items() if n.startswith(prefix)},
            sample=torch.stack(sample) if sample else torch.zeros(0, 0, self._spec.hidden_size),
            attention=lambda w, x: (
                LayerForward(self._spec, layer, w).attention(x.flatten(0, 1), len(x)).view(x.shape)
            ),
            ffn=lambda w, x: LayerForward(self._spec, layer, w).ffn(x),
        )

    def _observe(
        self, layer: int, weights: Mapping[str, torch.Tensor], gatherer: StatsGatherer
    ) -> list[torch.Tensor]:
        """All windows through the layer as it is; those that are the sample."""
        if layer == 0 and not self._path(0).exists():
            self._embed()
        forward = LayerForward(self._spec, layer, weights, gatherer.observe, without="ffn.down_proj")
        sample, kept = [], sample_windows([len(ids) for ids in self._windows])
        with self._open(layer) as states:
            for some in self._batches:
                windows = [states.read(i).to(self._device) for i in some]
                sample += [x for i, x in zip(some, windows, strict=True) if i in kept]
                forward(torch.cat(windows), len(some))
                for name, seen in gatherer.largest().items():
                    _check_finite(seen, layer, f"what {name} is fed", some)
                self._advance(f"layer {layer}: statistics", len(some))
        return sample

    def _next_states(self, layer: int, weights: Mapping[str, torch.Tensor]) -> None:
        forward = LayerForward(self._spec, layer, weights)
        with self._open(layer) as before, self._open(layer + 1, write=True) as after:
            for some in self._batches:
                x = forward(torch.cat([before.read(i).to(self._device) for i in some]), len(some))
                _check_finite(x, layer, "its output once quantised", some)
                for one in x.cpu().chunk(len(some)):
                    after.append(one)
                self._advance(f"layer {layer}: next layer's inputs", len(some))
            after.finish()

    def _embed(self) -> None:
        embedding = self._checkpoint.read("embed.weight")
        dense = embedding.dequantize() if isinstance(embedding, GroupedTensor) else embedding
        with self._open(0, write=True) as states:
            for ids in self._windows:
                rows = torch.from_numpy(dense[np.asarray(ids)].astype(np.float32))
                states.append(rows * self._spec.embedding_scale)
            states.finish()
        self._checkpoint.release("embed.weight")

    def _path(self, layer: int) -> Path:
        return self._folder / f"states.{layer}.f32"

    def _open(self, layer: int, *, write: bool = False) -> HiddenStates:
        lengths = [len(ids) for ids in self._windows]
        return HiddenStates(self._path(layer), lengths, self._spec.hidden_size, write=write)

    def _advance(self, step: str, amount: int) -> None:
        self._done += amount
        self._tell(step, self._done, self._work)


def layer_weights(checkpoint: Checkpoint, layer: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """float32, by canonical name without the prefix `layers.{layer}.`."""
    prefix = f"layers.{layer}."
    weights = {}
    for name in sorted(n for n in checkpoint.names() if n.startswith(prefix)):
        tensor = checkpoint.read(name)
        dense = tensor.dequantize() if isinstance(tensor, GroupedTensor) else tensor.astype(np.float32)
        weights[name.removeprefix(prefix)] = torch.from_numpy(np.array(dense, np.float32)).to(device)
        checkpoint.release(name)
    return weights


def sample_windows(lengths: Sequence[int]) -> frozenset[int]:
    """Windows of the commonest length, spread evenly, of about SAMPLE_TOKENS together."""
    if not lengths:
        return frozenset()
    length = max(set(lengths), key=lambda one: (lengths.count(one), one))
    alike = [i for i, one in enumerate(lengths) if one == length]
    count = max(1, min(len(alike), SAMPLE_TOKENS // length))
    return frozenset(alike[i * len(alike) // count] for i in range(count))


def _batches(lengths: Sequence[int], most: int) -> list[range]:
    """Neighbouring windows of one length, up to `most` together."""
    batches, begin = [], 0
    for end in range(1, len(lengths) + 1):
        if end == len(lengths) or lengths[end] != lengths[begin] or end - begin == most:
            batches.append(range(begin, end))
            begin = end
    return batches


def _check_finite(x: torch.Tensor, layer: int, what: str, windows: range) -> None:
    if not bool(torch.isfinite(x).all()):
        some = f"window {windows[0]}" if len(windows) == 1 else f"windows {windows[0]} to {windows[-1]}"
        raise ModelError(
            f"layer {layer}: {what} is not finite (NaN or infinite) for calibration {some}; the model"
            " overflows on this text or is damaged. Nothing was written."
        )


def _check_result(layer: int, result: LayerResult) -> None:
    for name, tensor in result.tensors.items():
        parts = (tensor.scales, tensor.mins) if isinstance(tensor, GroupedTensor) else (tensor,)
        if not all(part is None or np.isfinite(part).all() for part in parts):
            raise ModelError(
                f"layer {layer}: quantising {name} gave values that are not finite. Nothing was written."
            )
