"""Packed weights in a file: written once, then read straight into place.

Owns the name of a layout, by which a file of another version is told. Knows `packed.bin`, no other file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lmdeploy.errors import ModelError
from lmdeploy.models.packed import PIECE, WEIGHTS, Packed
from lmdeploy.turbomind.layout import ModelLayout
from lmdeploy.turbomind.placement import Placement, placement_digest

if TYPE_CHECKING:
    from lmdeploy.turbomind._turbomind import Model

LAYOUT_VERSION = 2  # of what csrc/pack.cpp makes; a test tells when it must be raised
_AGAIN = "convert the model again: lmdeploy convert MODEL DIR --force"


def layout_name(layout: ModelLayout) -> str:
    """Version and fingerprint of the packing code, and a digest of where everything of the model lies.

    The fingerprint is of small matrices packed by the code that runs: other code has another name even where
    the version was forgotten.
    """
    from lmdeploy.turbomind import _turbomind as native

    return f"{LAYOUT_VERSION}-{native.layout_fingerprint():016x}-{placement_digest(layout)}"


def read_weights(model: Model, directory: Path, packed: Packed, layout: ModelLayout) -> None:
    """Fill an empty model. ModelError when the file is of another layout, damaged or cannot be read."""
    path, needed = directory / WEIGHTS, layout_name(layout)
    if packed.layout != needed or packed.nbytes != layout.nbytes:
        raise ModelError(
            f"{path}: packed by lmdeploy {packed.lmdeploy} in layout {packed.layout}; this version or these"
            f" options need {needed}; {_AGAIN}."
        )
    sums = np.array(packed.checksums, np.uint64)
    try:
        with path.open("rb", buffering=0) as file:
            damaged = model.read_image(file.fileno(), packed.nbytes, PIECE, sums)
    except (OSError, RuntimeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}.") from None
    if damaged >= 0:
        begin, end = damaged * PIECE, min((damaged + 1) * PIECE, packed.nbytes)
        raise ModelError(
            f"{path}: bytes {begin} to {end} do not match their checksum: the file is damaged; {_AGAIN}."
        )
    Placement(model, layout).run()


def write_weights(model: Model, directory: Path, progress: Callable[[int], None]) -> tuple[int, ...]:
    """packed.bin from a loaded model, and its checksums. progress: told the bytes written. OSError."""
    from lmdeploy.turbomind import _turbomind as native

    image, sums = model.image(), []
    with (directory / WEIGHTS).open("wb", buffering=0) as file:
        for begin in range(0, len(image), PIECE):
            piece = image[begin : begin + PIECE]
            sums.append(native.checksum(piece))
            rest = piece.data
            while rest:
                rest = rest[file.write(rest) :]
            progress(begin + len(piece))
    return tuple(sums)
