"""How far models are from a reference on the same tokens: perplexity, divergence, agreement.

All from float32 logits of every position of every window; nothing is sampled or cut off. KL is that of the
candidate's next-token distribution from the reference's, sum p log(p / q) in nats;
perplexity is exp of the mean negative log-likelihood of the text's own next tokens.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from lmdeploy.lite.states import HiddenStates
from lmdeploy.models.checkpoint import Checkpoint
from lmdeploy.quality.hidden import Head, Tell, Windows, last_hidden

_ROWS = 256  # positions whose logits are in memory at once


@dataclass(frozen=True, slots=True)
class Positions:
    """Of one model, one value for each position that predicts a token of a window; float64.

    loss: negative log-likelihood of the next token. kl, agrees: against the reference; None for itself.
    """

    loss: npt.NDArray[np.float64]
    kl: npt.NDArray[np.float64] | None = None
    agrees: npt.NDArray[np.bool_] | None = None

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.loss.mean()))

    @property
    def mean_kl(self) -> float:
        return 0.0 if self.kl is None else float(self.kl.mean())

    @property
    def p99_kl(self) -> float:
        return 0.0 if self.kl is None else float(np.quantile(self.kl, 0.99))

    @property
    def top1(self) -> float:
        """Share of positions whose likeliest token is the reference's."""
        return 1.0 if self.agrees is None else float(self.agrees.mean())

    def of(self, chosen: slice | npt.NDArray[np.bool_]) -> Positions:
        return Positions(
            self.loss[chosen],
            None if self.kl is None else self.kl[chosen],
            None if self.agrees is None else self.agrees[chosen],
        )


def compare(
    reference: Checkpoint, candidates: Sequence[Checkpoint], windows: Windows, tell: Tell = lambda *_: None
) -> list[Positions]:
    """Of the reference and of each candidate, positions in the order of the windows (a window of n tokens has
    n - 1). All models read the same ids: they must share a vocabulary."""
    models = [reference, *candidates]
    with ExitStack() as stack:
        hidden = []
        for number, model in enumerate(models):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmdeploy-quality-")))
            told = _of_several(tell, number, len(models), len(windows))
            hidden.append(stack.enter_context(last_hidden(model, windows, folder, told)))
        layers = sum(len(model.spec.layers) for model in models)

        def told_at_the_end(window: int) -> None:
            tell("distributions", layers * len(windows) + window, (layers + 1) * len(windows))

        return distances([Head(model) for model in models], hidden, windows, told_at_the_end)


def distances(
    heads: Sequence[Head],
    hidden: Sequence[HiddenStates],
    windows: Windows,
    tell: Callable[[int], None] = lambda _: None,
) -> list[Positions]:
    """As `compare`, from what `last_hidden` gave of each model, the reference first. tell: windows done."""
    rows: list[list[tuple[npt.NDArray[np.float64], ...]]] = [[] for _ in heads]
    for i, ids in enumerate(windows):
        states = [one.read(i) for one in hidden]
        for begin in range(0, len(ids) - 1, _ROWS):
            some = slice(begin, min(begin + _ROWS, len(ids) - 1))
            targets = torch.tensor(ids[some.start + 1 : some.stop + 1])
            logs = [_log_softmax(head(x[some])) for head, x in zip(heads, states, strict=True)]
            for found, log in zip(rows, logs, strict=True):
                found.append(_row_values(logs[0], log, targets))
        tell(i + 1)
    return [_joined(found, own=number == 0) for number, found in enumerate(rows)]


def _of_several(tell: Tell, number: int, count: int, windows: int) -> Tell:
    """Of one model's layers, as a part of the work; `windows` steps follow when all models are through."""
    return lambda step, done, work: tell(
        f"model {number + 1} of {count}, {step}", number * work + done, count * work + windows
    )


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits, -1)


def _row_values(
    reference: torch.Tensor, log: torch.Tensor, targets: torch.Tensor
) -> tuple[npt.NDArray[np.float64], ...]:
    loss = -log.gather(1, targets[:, None])[:, 0]
    kl = (reference.exp() * (reference - log)).sum(-1, dtype=torch.float64)
    agrees = reference.argmax(-1) == log.argmax(-1)
    return loss.double().numpy(), kl.numpy(), agrees.double().numpy()


def _joined(found: list[tuple[npt.NDArray[np.float64], ...]], own: bool) -> Positions:
    loss, kl, agrees = (np.concatenate(part) for part in zip(*found, strict=True))
    return Positions(loss) if own else Positions(loss, np.maximum(kl, 0.0), agrees > 0.5)
