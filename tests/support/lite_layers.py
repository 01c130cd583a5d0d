"""Layers as `lmdeploy lite` hands them to an algorithm, and their results as weights."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from lmdeploy.lite.problem import LayerProblem, LayerResult
from lmdeploy.quant.tensors import GroupedTensor


def as_arrays(result: LayerResult) -> dict[str, npt.NDArray[np.float32]]:
    """What the quantised layer computes with."""
    return {
        name: tensor.dequantize() if isinstance(tensor, GroupedTensor) else tensor
        for name, tensor in result.tensors.items()
    }


def as_weights(result: LayerResult) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(values) for name, values in as_arrays(result).items()}


class Collected:
    """Both the algorithm and the sink of a walk that quantises nothing: keeps the problems."""

    def __init__(self) -> None:
        self.problems: list[LayerProblem] = []

    def quantise(self, problem: LayerProblem) -> LayerResult:
        self.problems.append(problem)
        return LayerResult({})

    def finished(self, layer: int) -> bool:
        return False

    def put(self, layer: int, result: LayerResult) -> None:
        pass

    def as_read(self, layer: int, result: LayerResult) -> Mapping[str, npt.NDArray[np.float32]]:
        return {}
