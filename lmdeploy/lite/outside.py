"""The matrices that no layer has, embedding and output matrix, in 8 bits: rounded plainly, rows at a time.

Eight symmetric bits with a scale for every 128 inputs lose so little that no calibration is needed. A model
that ties the two has one matrix for both. Knows no file.
"""

from __future__ import annotations

import numpy as np
import torch

from lmdeploy.errors import ConfigError, ModelError
from lmdeploy.lite.problem import LayerResult, LinearReport
from lmdeploy.lite.rounding import full_grid
from lmdeploy.models.checkpoint import Checkpoint
from lmdeploy.models.formats.writers import Writer
from lmdeploy.models.spec import ModelSpec
from lmdeploy.quant.scheme import WeightScheme
from lmdeploy.quant.tensors import GroupedTensor

SCHEME = WeightScheme(8, 128, symmetric=True)
_ROWS_AT_ONCE = 2048


def outside_schemes(spec: ModelSpec, writer: Writer) -> dict[str, WeightScheme | None]:
    """Of the matrices that no layer has, by canonical name. ConfigError when the format cannot hold them."""
    if not writer.outside:
        raise ConfigError(
            f"the format {writer.name} holds no embedding and output matrix in 8 bits; compressed-tensors"
            " does"
        )
    return dict.fromkeys(("embed",) if spec.tie_embeddings else ("embed", "lm_head"), SCHEME)


def outside_result(checkpoint: Checkpoint, schemes: dict[str, WeightScheme | None]) -> LayerResult:
    """Those of `schemes`, rounded; `error` is |W - Q|^2 / |W|^2. ModelError when a weight is not finite."""
    tensors, reports = dict[str, GroupedTensor](), []
    for name, scheme in schemes.items():
        if scheme is not None:
            tensors[f"{name}.weight"], report = _rounded(checkpoint, name, scheme)
            reports.append(report)
    return LayerResult(tensors, tuple(reports))


def _rounded(checkpoint: Checkpoint, name: str, scheme: WeightScheme) -> tuple[GroupedTensor, LinearReport]:
    weight = checkpoint.read(f"{name}.weight")
    assert not isinstance(weight, GroupedTensor)
    (n, k), lost, size = weight.shape, 0.0, 0.0
    group = full_grid(torch.zeros(1, k), scheme).group
    codes, scales = np.empty((n, k), np.int8), np.empty((n, scheme.groups(k)), np.float16)
    for begin in range(0, n, _ROWS_AT_ONCE):
        rows = slice(begin, begin + _ROWS_AT_ONCE)
        part = torch.from_numpy(weight[rows].astype(np.float32))
        grid = full_grid(part, scheme)
        rounded = grid.codes(part)
        lost += float((grid.values(rounded) - part).square().sum())
        size += float(part.square().sum())
        tensor = grid.tensor(rounded)
        codes[rows], scales[rows] = tensor.codes, tensor.scales
    if not np.isfinite(lost):
        raise ModelError(f"{checkpoint.called(f'{name}.weight')} holds values too large to round to 8 bits")
    checkpoint.release(f"{name}.weight")
    bits = scheme.bits_per_weight(k)
    whole = GroupedTensor(scheme.bits, group, codes, scales)
    return whole, LinearReport(name, bits, lost / size if size else 0.0, "rounded plainly")
