"""Bytes of a 7B model in 4 bits beside float16, from shapes alone: on disk, and as the engine packs it.

The shape is Llama-2-7B's, matrices in groups of 128 with zero points, embedding and head in 8 bits by group.
"""

from __future__ import annotations

from dataclasses import dataclass

from lmdeploy.models.spec import AttentionSpec, FfnSpec, LayerSpec, ModelSpec, NormSpec, RopeSpec
from lmdeploy.quant.scheme import WeightScheme
from lmdeploy.turbomind.layout import model_layout

_ATTENTION = AttentionSpec(32, 32, 128, 128**-0.5, RopeSpec(10000.0, 128))
SHAPE = ModelSpec("llama", 4096, 32_000, 4096, NormSpec(1e-5), (LayerSpec(_ATTENTION, FfnSpec(11_008)),) * 32)
LAYERS, ENDS = WeightScheme(4, 128, False), WeightScheme(8, 128, True)


@dataclass(frozen=True, slots=True)
class _Header:
    shape: tuple[int, ...]
    kind: str
    group_size: int = 0
    ordered: bool = False


def share_of_float16() -> dict[str, float]:
    """By place: `on disk` and `in memory`."""
    headers = {}
    packed = wide = 0.0
    for name, shape in SHAPE.tensors():
        scheme = _scheme(name, shape)
        size = float(shape[0] if len(shape) == 1 else shape[0] * shape[1])
        wide += 2 * size
        packed += 2 * size if scheme is None else size * scheme.bits_per_weight(shape[1]) / 8
        if scheme is None:
            headers[name] = _Header(shape, "float16")
        else:
            headers[name] = _Header(shape, "int4_zero" if scheme.bits == 4 else "int8", scheme.group_size)
    dense = {name: _Header(shape, "float16") for name, shape in SHAPE.tensors()}
    memory = model_layout(SHAPE, headers).nbytes / model_layout(SHAPE, dense).nbytes
    return {"on disk": packed / wide, "in memory": memory}


def _scheme(name: str, shape: tuple[int, ...]) -> WeightScheme | None:
    if len(shape) == 1:
        return None
    return LAYERS if name.startswith("layers.") else ENDS
