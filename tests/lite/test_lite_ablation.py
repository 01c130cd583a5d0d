"""Each step of the default method earns its place: held-out divergence of the demo model's grid-free twin.

Two layers among those that suffer most are quantised, by statistics of the original's inputs, so that the
test is short.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from demo_directory import demo_directory
from lite.texts import Window, calibration, held_out
from lite.twin import make_twin
from lite_layers import as_weights

from lmdeploy.lite.forward import LayerForward
from lmdeploy.lite.methods import quantiser
from lmdeploy.lite.problem import LayerProblem, LayerResult
from lmdeploy.lite.recipe import Recipe
from lmdeploy.lite.smoothing import local_linears
from lmdeploy.lite.stats import StatsGatherer
from lmdeploy.lite.walk import layer_weights
from lmdeploy.models.checkpoint import Checkpoint
from lmdeploy.models.reference import Decoder
from lmdeploy.models.registry import open_checkpoint
from lmdeploy.quant.scheme import WeightScheme
from lmdeploy.text.tokenizer import load_tokenizer

LAYERS = (18, 29)
STEPS = {
    "plain": Recipe("rtn", clip=False),
    "scales": Recipe("awq", clip=False),
    "clipping": Recipe("awq"),
    "compensation": Recipe("awq+gptq"),
}
TOKENS = 256
Windows = list[Window]


class Model:
    """The original, layer by layer."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.spec = checkpoint, checkpoint.spec
        ends = ("embed.weight", "norm.weight")
        self.decoder = Decoder(
            self.spec, {n: torch.from_numpy(np.asarray(checkpoint.read(n), np.float32)) for n in ends}
        )

    def problems(self, windows: Windows) -> dict[int, LayerProblem]:
        """Of LAYERS, from what the original feeds them."""
        states, found = [self.decoder.embed(torch.from_numpy(ids.astype(np.int64))) for ids in windows], {}
        for i in range(len(self.spec.layers)):
            weights, gatherer = layer_weights(self.checkpoint, i), StatsGatherer(self.spec, i)
            forward = LayerForward(self.spec, i, weights, gatherer.observe if i in LAYERS else None)
            if i in LAYERS:
                sample = torch.stack(states[:4])
                states = [forward(x) for x in states]
                found[i] = self._problem(i, weights, gatherer, sample)
            else:
                states = [forward(x) for x in states]
        return found

    def _problem(
        self, i: int, weights: dict[str, torch.Tensor], gatherer: StatsGatherer, sample: torch.Tensor
    ) -> LayerProblem:
        def attention(w: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return torch.stack([LayerForward(self.spec, i, w).attention(one) for one in x])

        def ffn(w: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return torch.stack([LayerForward(self.spec, i, w).ffn(one) for one in x])

        schemes = {x.name: WeightScheme() for x in local_linears(self.spec, i)}
        return LayerProblem(self.spec, i, weights, gatherer.stats(), schemes, sample, attention, ffn)

    def log_probabilities(self, windows: Windows, results: Mapping[int, LayerResult]) -> torch.Tensor:
        """float32 [tokens, vocab] with the layers in `results` in place of the original's."""
        states = [self.decoder.embed(torch.from_numpy(ids.astype(np.int64))) for ids in windows]
        for i in range(len(self.spec.layers)):
            weights = layer_weights(self.checkpoint, i)
            changed = as_weights(results[i]) if i in results else {}
            states = [LayerForward(self.spec, i, weights | changed)(x) for x in states]
        return self.decoder.logits(self.decoder.last_norm(torch.cat(states))).log_softmax(-1)


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_twin(demo_directory(), tmp_path_factory.mktemp("twin") / "twin")


@pytest.mark.timeout(900)
def test_no_step_makes_held_out_divergence_worse(twin: Path) -> None:
    tokenizer = load_tokenizer(twin)
    held = held_out(tokenizer, 2, TOKENS)
    with torch.no_grad():
        model = Model(open_checkpoint(twin))
        problems = model.problems(calibration(tokenizer, 10, TOKENS))
        original = model.log_probabilities(held, {})
        divergence = {}
        for name, recipe in STEPS.items():
            results = {i: quantiser(recipe)(problem) for i, problem in problems.items()}
            rounded = model.log_probabilities(held, results)
            divergence[name] = float((original.exp() * (original - rounded)).sum(-1).mean())
    values = list(divergence.values())
    assert values == sorted(values, reverse=True), divergence
    assert divergence["clipping"] < 0.8 * divergence["plain"], divergence
    assert divergence["compensation"] < 0.5 * divergence["plain"], divergence
