"""Mixed precision: which matrices get more bits, from their measured sensitivity.

One pass forward over a few windows measures what rounding each matrix under each scheme does to its output,
one pass back (`sensitivity`) what that does to the model; `allocation` shares out the bits. Memory holds one
layer and the hidden states of these windows. Knows no file format: the caller says which schemes can be held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from lmdeploy.errors import ConfigError
from lmdeploy.lite.allocation import Choice, allocate
from lmdeploy.lite.forward import LayerForward
from lmdeploy.lite.recipe import Recipe
from lmdeploy.lite.refine import row_errors
from lmdeploy.lite.rounding import full_grid
from lmdeploy.lite.sensitivity import head_gradient, layer_gradient
from lmdeploy.lite.stats import StatsGatherer
from lmdeploy.lite.walk import layer_weights
from lmdeploy.models.checkpoint import Checkpoint
from lmdeploy.models.reference import Decoder
from lmdeploy.models.spec import ModelSpec
from lmdeploy.quant.scheme import WHOLE_ROW, WeightScheme
from lmdeploy.quant.tensors import GroupedTensor

TOKENS = 4096
_VALUES = 1 << 28  # of hidden states at most: 1 GiB
Schemes = Mapping[str, WeightScheme | None]  # by canonical matrix name; None: 16-bit floats
Holds = Callable[[str, WeightScheme], bool]  # whether a matrix can be stored so
Tell = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Measured:
    """divergence: by matrix, of each scheme it can have, KL in nats per token to expect from plain rounding;
    None (not rounded) costs nothing."""

    weights: Mapping[str, int]
    bits: Mapping[str, Mapping[WeightScheme | None, float]]
    divergence: Mapping[str, Mapping[WeightScheme | None, float]]


def mixed_schemes(
    checkpoint: Checkpoint,
    windows: Sequence[Sequence[int]],
    recipe: Recipe,
    schemes: Schemes,
    holds: Holds,
    tell: Tell,
) -> tuple[dict[str, WeightScheme | None], str]:
    """What recipe.keep or recipe.target_bpw makes of `schemes`, and a line that says so.

    ConfigError without windows, and as `check_mixed`.
    """
    if not windows:
        raise ConfigError("mixed precision needs calibration text to measure sensitivity (samples is 0)")
    check_mixed(checkpoint, recipe, schemes, holds)
    measured = measure(checkpoint, windows, _offered(recipe, schemes, holds), tell)
    chosen = _by_target(recipe, measured) if recipe.target_bpw else _by_layer(recipe, measured)
    return {**schemes, **chosen}, _line(chosen, measured)


def check_mixed(checkpoint: Checkpoint, recipe: Recipe, schemes: Schemes, holds: Holds) -> None:
    """ConfigError for what `mixed_schemes` could not do with any text; headers only."""
    layers = len(checkpoint.spec.layers)
    if recipe.keep > layers:
        raise ConfigError(f"--keep {recipe.keep}: the model has {layers} layers")
    if recipe.keep == layers and recipe.keep_bits == 16:
        raise ConfigError(
            f"--keep {recipe.keep}: every matrix would stay as it is; keep fewer, or give --keep-bits 8"
        )
    if recipe.target_bpw is None:
        return
    least, weights = 0.0, 0
    for name, offered in _offered(recipe, schemes, holds).items():
        n, k = checkpoint.info(f"{name}.weight").shape
        least += n * k * min(_bits(s, k) for s in offered)
        weights += n * k
    if least > recipe.target_bpw * weights:
        raise ConfigError(
            f"--target-bpw {recipe.target_bpw:g}: the smallest schemes need {least / weights:.3f} bits"
        )


def _offered(recipe: Recipe, schemes: Schemes, holds: Holds) -> dict[str, list[WeightScheme | None]]:
    """The schemes that each matrix can have."""
    options = _options(recipe)
    return {
        name: [s for s in options if s is None or s == scheme or holds(name, s)]
        for name, scheme in schemes.items()
        if scheme is not None
    }


def _bits(scheme: WeightScheme | None, inputs: int) -> float:
    return 16.0 if scheme is None else scheme.bits_per_weight(inputs)


def _options(recipe: Recipe) -> list[WeightScheme | None]:
    base = recipe.scheme
    more = replace(base, bits=8)
    if recipe.target_bpw is None:
        return [base, more if recipe.keep_bits == 8 else None]
    sizes = (128, 64, 32) if base.ordered else (WHOLE_ROW, 128, 64, 32)  # one group has no order
    groups = [g for g in sizes if g != base.group_size]
    return [base, *(replace(base, group_size=g) for g in groups), more, None]


def measure(
    checkpoint: Checkpoint,
    windows: Sequence[Sequence[int]],
    offered: Mapping[str, Sequence[WeightScheme | None]],
    tell: Tell,
) -> Measured:
    """Of every matrix in `offered`, under every scheme it may have."""
    windows = _some(windows, checkpoint.spec)
    layers = range(len(checkpoint.spec.layers))
    work = 2 * len(layers)
    states = [_embedded(checkpoint, windows)]
    errors: dict[str, dict[WeightScheme | None, torch.Tensor]] = {}
    weights, bits = dict[str, int](), dict[str, dict[WeightScheme | None, float]]()
    with torch.no_grad():
        for layer in layers:
            tell(f"layer {layer}: errors of each scheme", layer, work)
            states.append(_forward(checkpoint, layer, states[-1], offered, errors))
    for name, schemes in offered.items():
        shape = checkpoint.info(f"{name}.weight").shape
        weights[name] = shape[0] * shape[1]
        bits[name] = {s: weights[name] * _bits(s, shape[1]) for s in schemes}
    gradients = _head_gradients(checkpoint, states.pop())
    divergence = {}
    for layer in reversed(layers):
        tell(f"layer {layer}: sensitivity", work - 1 - layer, work)
        gradients, importance = _backward(checkpoint, layer, states.pop(), gradients, list(offered))
        for name, channels in importance.items():
            divergence[name] = {s: 0.5 * float((e * channels).sum()) for s, e in errors[name].items()}
    return Measured(weights, bits, divergence)


def _some(windows: Sequence[Sequence[int]], spec: ModelSpec) -> list[Sequence[int]]:
    """Evenly spread, TOKENS together (fewer of a large model) or the first alone."""
    tokens = min(TOKENS, _VALUES // (spec.hidden_size * len(spec.layers)))
    count = max(1, min(len(windows), tokens // max(1, len(windows[0]))))
    return [windows[i * len(windows) // count] for i in range(count)]


def _embedded(checkpoint: Checkpoint, windows: list[Sequence[int]]) -> list[torch.Tensor]:
    table = _float32(checkpoint, "embed.weight")
    decoder = Decoder(checkpoint.spec, {"embed.weight": table})
    return [decoder.embed(torch.from_numpy(np.asarray(ids, np.int64))) for ids in windows]


def _forward(
    checkpoint: Checkpoint,
    layer: int,
    inputs: list[torch.Tensor],
    offered: Mapping[str, Sequence[WeightScheme | None]],
    errors: dict[str, dict[WeightScheme | None, torch.Tensor]],
) -> list[torch.Tensor]:
    """The layer's outputs; adds to `errors` the channels' output errors [N] of its matrices."""
    weights, gatherer = layer_weights(checkpoint, layer), StatsGatherer(checkpoint.spec, layer)
    forward = LayerForward(checkpoint.spec, layer, weights, gatherer.observe)
    outputs = [forward(x) for x in inputs]
    for name, stats in gatherer.stats().items():
        full = f"layers.{layer}.{name}"
        weight = weights[f"{name}.weight"]
        errors[full] = {s: _channel_errors(weight, s, stats.gram) for s in offered.get(full, ())}
    return outputs


def _channel_errors(weight: torch.Tensor, scheme: WeightScheme | None, gram: torch.Tensor) -> torch.Tensor:
    if scheme is None:
        return torch.zeros(len(weight))
    grid = full_grid(weight, scheme)
    return row_errors(weight, grid.values(grid.codes(weight)), gram)


def _head_gradients(checkpoint: Checkpoint, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    head = "embed.weight" if checkpoint.spec.tie_embeddings else "lm_head.weight"
    decoder = Decoder(checkpoint.spec, {n: _float32(checkpoint, n) for n in ("norm.weight", head)})
    generator = torch.Generator().manual_seed(0)
    return [head_gradient(lambda x: decoder.logits(decoder.last_norm(x)), x, generator) for x in outputs]


def _backward(
    checkpoint: Checkpoint,
    layer: int,
    inputs: list[torch.Tensor],
    gradients: list[torch.Tensor],
    wanted: list[str],
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """The gradients by the layer's inputs, and the importance of its matrices' channels by canonical name."""
    spec, prefix = checkpoint.spec, f"layers.{layer}."
    weights = layer_weights(checkpoint, layer)
    names = [name.removeprefix(prefix) for name in wanted if name.startswith(prefix)]
    before, total = list[torch.Tensor](), dict[str, torch.Tensor]()
    for x, gradient in zip(inputs, gradients, strict=True):
        found, importance = layer_gradient(
            lambda w, x: LayerForward(spec, layer, w)(x), weights, names, x, gradient
        )
        before.append(found)
        for name, channels in importance.items():
            total[prefix + name] = total.get(prefix + name, 0) + channels / len(inputs)
    return before, total


def _by_target(recipe: Recipe, measured: Measured) -> dict[str, WeightScheme | None]:
    most = (recipe.target_bpw or 0) * sum(measured.weights.values())
    order = {name: list(bits) for name, bits in measured.bits.items()}
    units = {
        name: [Choice(measured.bits[name][s], measured.divergence[name][s]) for s in schemes]
        for name, schemes in order.items()
    }
    chosen = allocate(units, most).chosen
    return {name: order[name][i] for name, i in chosen.items()}


def _by_layer(recipe: Recipe, measured: Measured) -> dict[str, WeightScheme | None]:
    """The schemes of the layers that save most divergence."""
    more = replace(recipe.scheme, bits=8) if recipe.keep_bits == 8 else None
    saved: dict[str, float] = {}
    for name, divergence in measured.divergence.items():
        if more in divergence:
            layer = name.split(".")[1]
            saved[layer] = saved.get(layer, 0.0) + divergence[recipe.scheme] - divergence[more]
    kept = sorted(saved, key=lambda layer: -saved[layer])[: recipe.keep]
    return {
        name: more
        for name, divergence in measured.divergence.items()
        if more in divergence and name.split(".")[1] in kept
    }


def _line(chosen: Schemes, measured: Measured) -> str:
    counts: dict[str, int] = {}
    for scheme in chosen.values():
        what = "16 bits" if scheme is None else f"{scheme.bits} bits in groups of {scheme.group_size}"
        counts[what] = counts.get(what, 0) + 1
    parts = ", ".join(f"{count} matrices {what}" for what, count in sorted(counts.items()))
    return f"by measured sensitivity: {parts}"


def _float32(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    tensor = checkpoint.read(name)
    dense = tensor.dequantize() if isinstance(tensor, GroupedTensor) else tensor.astype(np.float32)
    checkpoint.release(name)
    return torch.from_numpy(np.array(dense, np.float32))
