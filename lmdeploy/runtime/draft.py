"""The draft model of speculative decoding before it is loaded: where it is, and whether it fits the first.

Reads headers and tokenizers, no weight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lmdeploy.config import EngineConfig
from lmdeploy.errors import ConfigError
from lmdeploy.models.checkpoint import Checkpoint
from lmdeploy.models.hub import resolve_model_path
from lmdeploy.models.registry import open_checkpoint
from lmdeploy.speculative import SpeculativeConfig
from lmdeploy.text.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True)
class Guesses:
    """What is known of speculation at start. `config.model` is a local path, `draft` its open checkpoint."""

    config: SpeculativeConfig | None
    draft: Checkpoint | None = None


@contextmanager
def opened_draft(wanted: SpeculativeConfig | None, config: EngineConfig, first: Path) -> Iterator[Guesses]:
    """The draft model that is wanted, open while in the block.

    Raises ConfigError when its tokens are not those of the model at `first`, and what opening it raises.
    """
    if wanted is None or not wanted.model:
        yield Guesses(wanted)
        return
    path = resolve_model_path(wanted.model, download_dir=config.download_dir)
    checkpoint = open_checkpoint(path)
    try:
        _check_vocabulary(wanted.model, path, first)
        yield Guesses(dataclasses.replace(wanted, model=str(path)), checkpoint)
    finally:
        checkpoint.close()


def _check_vocabulary(name: str, path: Path, first: Path) -> None:
    ours, theirs = load_tokenizer(first), load_tokenizer(path)
    ids = range(ours.vocab_size)
    same = len(ids) == theirs.vocab_size and all(ours.token_bytes(i) == theirs.token_bytes(i) for i in ids)
    if not same:
        raise ConfigError(
            f"speculative_config: the draft model {name} has another vocabulary than the model; take a "
            "smaller model of the same family",
            param="model",
        )
