"""The packed bytes of a model, from the bytes of its files and from the values that Python reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lmdeploy.models.checkpoint import Checkpoint
from lmdeploy.models.registry import open_checkpoint
from lmdeploy.quant.tensors import StoredMatrix, Tensor
from lmdeploy.turbomind.convert import pack
from lmdeploy.turbomind.layout import model_layout


class ByValues:
    """A checkpoint that hands over values only."""

    packed = None

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, self.spec = checkpoint, checkpoint.spec

    def read(self, name: str) -> Tensor:
        return self._checkpoint.read(name)

    def stored_matrix(self, name: str) -> StoredMatrix | None:
        return None

    def release(self, name: str) -> None:
        self._checkpoint.release(name)


def image(checkpoint: Any, threads: int = 2) -> Any:
    """uint8 of all packed weights."""
    names = checkpoint.names()
    layout = model_layout(checkpoint.spec, {name: checkpoint.info(name) for name in names})
    return pack(checkpoint, layout, threads).image().copy()


def both_images(path: Path) -> tuple[Any, Any, list[str]]:
    """From the file's bytes, by values, and the forms in which the file's matrices came."""
    checkpoint = open_checkpoint(path)
    layout = model_layout(checkpoint.spec, {name: checkpoint.info(name) for name in checkpoint.names()})
    by_values: Any = ByValues(checkpoint)
    fast, slow = (pack(one, layout, 2).image().copy() for one in (checkpoint, by_values))
    stored = [checkpoint.stored_matrix(name) for name in sorted(checkpoint.names())]
    return fast, slow, [one.form for one in stored if one is not None]
