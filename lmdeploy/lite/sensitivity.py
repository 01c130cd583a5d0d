"""How much the whole model suffers from an error in one matrix, from one pass back through its layers.

An error e in the output of a matrix moves the model's distribution of the next token by about
1/2 (g . e)^2 nats (KL), g being the gradient of -log p(t) for a token t drawn from the model itself (the
Fisher information; Martens 2014, arXiv 1412.1193). Here the channels' products are left out:
1/2 sum g_n^2 e_n^2.
Layers come one at a time, so that no more than one is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

Compute = Callable[[Mapping[str, torch.Tensor], torch.Tensor], torch.Tensor]


def head_gradient(
    logits: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Gradient [T, hidden] of the sum over tokens of -log p(drawn token), by the last layer's output.

    logits: [T, hidden] -> [T, vocab], last norm included; must let gradients through.
    """
    with torch.enable_grad():
        hidden = hidden.detach().requires_grad_()
        scores = logits(hidden)
        drawn = torch.multinomial(scores.detach().softmax(-1), 1, generator=generator)[:, 0]
        loss = torch.nn.functional.cross_entropy(scores, drawn, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, hidden)
    return gradient


def layer_gradient(
    layer: Compute,
    weights: Mapping[str, torch.Tensor],
    names: Sequence[str],
    inputs: torch.Tensor,
    gradient: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(gradient by the layer's inputs, by matrix name the mean over tokens of g_n^2 [N]).

    layer: inputs [T, hidden] to outputs, residual stream included. gradient [T, hidden]: by its outputs.
    Each matrix gets a bias of its own for every token, whose gradient is that of the matrix's output.
    """
    with torch.enable_grad():
        inputs = inputs.detach().requires_grad_()
        biases = {}
        for name in names:
            bias = weights.get(f"{name}.bias", inputs.new_zeros(len(weights[f"{name}.weight"])))
            biases[name] = bias.detach().expand(len(inputs), -1).clone().requires_grad_()
        outputs = layer({**weights, **{f"{n}.bias": b for n, b in biases.items()}}, inputs)
        found = torch.autograd.grad(outputs, [inputs, *biases.values()], gradient)
    return found[0], {name: g.pow(2).mean(0) for name, g in zip(biases, found[1:], strict=True)}
