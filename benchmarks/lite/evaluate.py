"""The comparison's judge: `lmdeploy.quality` on windows of token ids, without the first positions of each.

Models of every format are measured as `lmdeploy lite eval` measures them; of the original the last states are
computed once.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lmdeploy.lite.states import HiddenStates
from lmdeploy.models.registry import open_checkpoint
from lmdeploy.quality.divergence import distances
from lmdeploy.quality.headers import bits_per_weight
from lmdeploy.quality.hidden import Head, last_hidden


class Judge:
    """Compares models with one original on windows of token ids."""

    def __init__(self, original: Path, windows: Sequence[npt.NDArray[np.int32]], skip: int) -> None:
        """skip: positions at the start of each window that are not scored."""
        self._windows = [ids.tolist() for ids in windows]
        self._scored = np.concatenate([np.arange(len(ids) - 1) >= skip for ids in windows])
        self._original = self._states(original)

    def judge(self, model: Path) -> dict[str, float]:
        """perplexity, kl (mean, nats), kl_error, kl_p99, same_top (share of positions)."""
        heads, hidden = zip(self._original, self._states(model), strict=True)
        with hidden[1]:
            found = distances(heads, hidden, self._windows)[1].of(self._scored)
        assert found.kl is not None
        return {
            "perplexity": found.perplexity,
            "kl": found.mean_kl,
            "kl_error": float(found.kl.std() / np.sqrt(len(found.kl))),
            "kl_p99": found.p99_kl,
            "same_top": found.top1,
            "positions": len(found.kl),
        }

    def _states(self, model: Path) -> tuple[Head, HiddenStates]:
        """The states' file has no name any more; it goes when it is closed."""
        checkpoint = open_checkpoint(model)
        with tempfile.TemporaryDirectory() as folder:
            found = Head(checkpoint), last_hidden(checkpoint, self._windows, Path(folder))
        checkpoint.close()
        return found


def facts_of(model: Path) -> dict[str, float]:
    """bits_per_weight: what the files take for the layers' matrices, scales and zero points included, by
    weight (the embedding is left in 16 bits by every side); size_mb: of all weight files."""
    checkpoint = open_checkpoint(model)
    size = sum(file.stat().st_size for file in checkpoint.files if file.suffix in (".safetensors", ".gguf"))
    bits = bits_per_weight(checkpoint)
    checkpoint.close()
    return {"bits_per_weight": bits, "size_mb": size / 1e6}
