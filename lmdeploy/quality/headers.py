"""What a report says of a model's layers from headers alone."""

from __future__ import annotations

from collections.abc import Iterator

from lmdeploy.models.checkpoint import Checkpoint, TensorInfo
from lmdeploy.quant.scheme import InputRounding


def bits_per_weight(checkpoint: Checkpoint) -> float:
    """Of the matrices of all layers as the files hold them: codes, scales, zero points."""
    infos = list(_matrices(checkpoint))
    return 8 * sum(info.file_bytes for info in infos) / sum(info.shape[0] * info.shape[1] for info in infos)


def input_rounding(checkpoint: Checkpoint) -> InputRounding:
    """What is done to the inputs of some matrix; "other" before "bytes"."""
    kinds = {info.inputs for info in _matrices(checkpoint)}
    return "other" if "other" in kinds else "bytes" if "bytes" in kinds else "none"


def _matrices(checkpoint: Checkpoint) -> Iterator[TensorInfo]:
    for layer in range(len(checkpoint.spec.layers)):
        for linear in checkpoint.spec.linears(layer):
            yield checkpoint.info(f"{linear.name}.weight")
