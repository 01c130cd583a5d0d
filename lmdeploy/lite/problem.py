"""The seam between the walk over a model (`walk`) and the algorithms that quantise one layer of it.

The walk loads a layer, gathers what its inputs look like and hands over a `LayerProblem`; an algorithm
returns a `LayerResult`. Algorithms know no file and no other layer; the walk knows no rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from lmdeploy.models.spec import ModelSpec
from lmdeploy.quant.scheme import WeightScheme
from lmdeploy.quant.tensors import GroupedTensor


@dataclass(frozen=True, slots=True)
class InputStats:
    """Of the vectors [tokens, K] that one or several matrices of a layer multiply; all float32.

    mean_abs, max_abs: [K]. gram: [K, K], sum of x x^T over all tokens divided by their number.
    """

    tokens: int
    mean_abs: torch.Tensor
    max_abs: torch.Tensor
    gram: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerProblem:
    """One layer to quantise.

    weights: float32, by canonical name without the prefix `layers.{index}.` (`attn.q_proj.weight`,
    `attn_norm.weight`, ...). stats: by `LinearSpec.name` without that prefix; matrices with the same `fed_by`
    share one object. schemes: of each matrix by that name, None: stays in its own type.
    sample: float32 [sequences, tokens, hidden], some of the layer's inputs. attention and ffn compute the
    block's output before it is added to the residual stream, from such inputs (of attention: the layer's; of
    ffn: those with attention's output added), with the weights given.
    """

    spec: ModelSpec
    index: int
    weights: Mapping[str, torch.Tensor]
    stats: Mapping[str, InputStats]
    schemes: Mapping[str, WeightScheme | None]
    sample: torch.Tensor
    attention: Callable[[Mapping[str, torch.Tensor], torch.Tensor], torch.Tensor]
    ffn: Callable[[Mapping[str, torch.Tensor], torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LinearReport:
    """What quantising one matrix did. error: |(W - Q) x|^2 / |W x|^2 over the calibration inputs, or
    |W - Q|^2 / |W|^2 where there were too few (then `note` says so)."""

    name: str
    bits_per_weight: float
    error: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class LayerResult:
    """tensors: every tensor of the layer that changed, by the names of `LayerProblem.weights`; matrices that
    were quantised as GroupedTensor, others (norms and biases that took up scales) as float32 arrays."""

    tensors: Mapping[str, GroupedTensor | npt.NDArray[np.float32]]
    linears: tuple[LinearReport, ...] = ()
    notes: tuple[str, ...] = field(default=())


Quantise = Callable[[LayerProblem], LayerResult]
