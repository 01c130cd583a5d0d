"""From a checkpoint to torch tensors: one tensor at a time, dequantised.

Matrices take the compute type, vectors (norms, biases) stay float32. Knows no file format and no step.
"""

from __future__ import annotations

import numpy as np
import torch

from lmdeploy.errors import ModelError
from lmdeploy.logging import get_logger
from lmdeploy.models.checkpoint import Checkpoint
from lmdeploy.quant.tensors import GroupedTensor, Tensor

_ROWS_AT_ONCE = 1024  # so that reading takes little more memory than the tensor as it is in the file


def load_weights(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint's spec by canonical name. ModelError names a tensor that is damaged.

    All memory is taken first: what reading needs for a moment does not end up between the weights.
    """
    weights = {
        name: torch.empty(shape, device=device, dtype=dtype if len(shape) > 1 else torch.float32)
        for name, shape in checkpoint.spec.tensors()
    }
    grouped = 0
    for name, weight in weights.items():
        tensor = checkpoint.read(name)
        grouped += isinstance(tensor, GroupedTensor)
        for begin in range(0, len(weight), _ROWS_AT_ONCE):
            rows = slice(begin, begin + _ROWS_AT_ONCE)
            part = tensor.rows(rows) if isinstance(tensor, GroupedTensor) else tensor[rows]
            weight[rows].copy_(_values(part))
        del tensor
        if not bool(torch.isfinite(weight).all()):
            raise ModelError(
                f"tensor {name!r} holds values that are not finite in {_name(weight.dtype)}; the file is"
                " damaged or needs another dtype"
            )
    if grouped:
        get_logger().info("%d quantised tensors are dequantised to %s and kept so", grouped, _name(dtype))
    return weights


def _values(tensor: Tensor) -> torch.Tensor:
    """float32 on the CPU."""
    values = tensor.dequantize() if isinstance(tensor, GroupedTensor) else tensor.astype(np.float32)
    return torch.from_numpy(np.ascontiguousarray(values))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
