"""What a model's last norm puts out for windows of text, computed in float32 one layer at a time.

Where its files say that inputs of matrices are rounded to 8 bits (W8A8), they are.

Memory holds one layer and one window, whatever the model's size; the states lie in files of a given folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from lmdeploy.lite.forward import LayerForward, as_bytes
from lmdeploy.lite.states import HiddenStates
from lmdeploy.lite.walk import layer_weights
from lmdeploy.models.checkpoint import Checkpoint
from lmdeploy.models.reference import Decoder
from lmdeploy.quant.tensors import GroupedTensor

Windows = Sequence[Sequence[int]]
Tell = Callable[[str, int, int], None]  # a step, how much is done, how much there is


def last_hidden(
    checkpoint: Checkpoint, windows: Windows, folder: Path, tell: Tell = lambda *_: None
) -> HiddenStates:
    """float32 [tokens, hidden] of each window, after the last norm; open, in a file of `folder`."""
    spec, lengths = checkpoint.spec, [len(ids) for ids in windows]
    longest = max(lengths)
    layers, work = len(spec.layers), len(windows) * len(spec.layers)

    def states(layer: int, *, write: bool = False) -> HiddenStates:
        return HiddenStates(folder / f"{layer}.f32", lengths, spec.hidden_size, write=write)

    with torch.no_grad():
        with states(0, write=True) as first:
            embedding = dense(checkpoint, "embed.weight")
            for ids in windows:
                first.append(embedding[torch.tensor(ids)] * spec.embedding_scale)
            first.finish()
        del embedding
        for layer in range(layers):
            forward = layer_forward(checkpoint, layer, longest)
            with states(layer) as before, states(layer + 1, write=True) as after:
                for i in range(len(windows)):
                    after.append(forward(before.read(i)))
                    tell(f"layer {layer + 1} of {layers}", layer * len(windows) + i + 1, work)
                after.finish()
            (folder / f"{layer}.f32").unlink()
        return _normed(checkpoint, states(layers), states(layers + 1, write=True))


def layer_forward(
    checkpoint: Checkpoint, layer: int, longest: int, weights: Mapping[str, torch.Tensor] | None = None
) -> LayerForward:
    """A layer as its files mean it, for windows of up to `longest` tokens. weights: where they are read
    already, as `layer_weights` gives them."""
    prefix, names = f"layers.{layer}.", [linear.name for linear in checkpoint.spec.linears(layer)]
    rounded = {n.removeprefix(prefix) for n in names if rounds_inputs(checkpoint, n)}
    weights = layer_weights(checkpoint, layer) if weights is None else weights
    return LayerForward(checkpoint.spec.for_length(longest), layer, weights, rounded=rounded)


def rounds_inputs(checkpoint: Checkpoint, matrix: str) -> bool:
    return checkpoint.info(f"{matrix}.weight").inputs == "bytes"


def _normed(checkpoint: Checkpoint, before: HiddenStates, after: HiddenStates) -> HiddenStates:
    norm = Decoder(checkpoint.spec, {"norm.weight": dense(checkpoint, "norm.weight")}).last_norm
    with before, after:
        for i in range(len(before)):
            after.append(norm(before.read(i)))
        after.finish()
    before.path.unlink()
    return HiddenStates(after.path, after.lengths, checkpoint.spec.hidden_size)


class Head:
    """The output matrix of a model in float32: from normed states to logits."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        name = "embed" if checkpoint.spec.tie_embeddings else "lm_head"
        self._rounds = rounds_inputs(checkpoint, name)
        self._decoder = Decoder(checkpoint.spec, {f"{name}.weight": dense(checkpoint, f"{name}.weight")})

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocab] of [rows, hidden]."""
        with torch.no_grad():
            return self._decoder.logits(as_bytes(hidden) if self._rounds else hidden)


def dense(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """float32, and the file's memory given back."""
    tensor = checkpoint.read(name)
    values = tensor.dequantize() if isinstance(tensor, GroupedTensor) else tensor.astype(np.float32)
    result = torch.from_numpy(np.array(values, np.float32))
    checkpoint.release(name)
    return result
