"""Which matrices of a layer can take a scale on their inputs that the tensor before them gives back.

Follows from the spec alone: matrices with the same `fed_by` share their inputs; a norm or a matrix that
feeds them divides its outputs by what they multiply, and the layer computes the same function (AWQ, Lin et
al. 2023, arXiv 2306.00978, section 3.2; SmoothQuant, Xiao et al. 2022, arXiv 2211.10438). Knows no rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from lmdeploy.lite.problem import InputStats
from lmdeploy.models.spec import LinearSpec, ModelSpec

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class SmoothingGroup:
    """Matrices `linears` multiply what `source` (a norm or a matrix) puts out, channel by channel.

    shared_by: query heads that read the same value head (K37); their inputs k take the scale of channel
    (k // (shared_by * head_dim)) * head_dim + k % head_dim of the source. 1: input k is channel k.
    block: which function of a LayerProblem computes the output these matrices have a part in.
    """

    source: str
    linears: tuple[str, ...]
    block: str
    offset: float | None = None  # of a norm's weight; None: source is a matrix
    shared_by: int = 1
    head_dim: int = 1

    def to_inputs(self, channels: torch.Tensor) -> torch.Tensor:
        """Values by channel of the source, by input of the matrices."""
        heads = channels.view(-1, self.head_dim)
        return heads.repeat_interleave(self.shared_by, 0).reshape(-1)

    def to_channels(self, inputs: torch.Tensor) -> torch.Tensor:
        """Values by input of the matrices, meaned over the inputs that share a channel of the source."""
        return inputs.view(-1, self.shared_by, self.head_dim).mean(1).reshape(-1)


def local_linears(spec: ModelSpec, layer: int) -> Iterator[LinearSpec]:
    """`ModelSpec.linears` by the names of a LayerProblem."""
    prefix = f"layers.{layer}."
    for linear in spec.linears(layer):
        yield replace(
            linear, name=linear.name.removeprefix(prefix), fed_by=linear.fed_by.removeprefix(prefix)
        )


def smoothing_groups(spec: ModelSpec, layer: int) -> list[SmoothingGroup]:
    """In the order in which they are computed; inputs that nothing can scale back have none."""
    linears = {linear.name: linear for linear in local_linears(spec, layer)}
    fed: dict[str, list[str]] = {}
    for linear in linears.values():
        fed.setdefault(linear.fed_by, []).append(linear.name)
    attention = spec.layers[layer].attention
    groups = []
    for source, names in fed.items():
        block = "attention" if names[0].startswith("attn.") else "ffn"
        group = SmoothingGroup(source, tuple(names), block)
        if source.endswith("_norm"):
            groups.append(replace(group, offset=spec.norm.offset))
        elif source in linears:
            inputs, channels = linears[names[0]].in_features, linears[source].out_features
            if inputs != channels:
                shared = attention.num_heads // attention.num_kv_heads
                group = replace(group, shared_by=shared, head_dim=attention.head_dim)
            groups.append(group)
    return groups


def storable(
    weights: Mapping[str, torch.Tensor], group: SmoothingGroup, scales: torch.Tensor
) -> torch.Tensor:
    """Scales [channels] close to those wanted, such that a norm's new weight has 8 significant bits.

    Then it is exact in bfloat16 and float16, and folding adds no error of its own. Channels whose norm weight
    is zero keep 1.
    """
    if group.offset is None:
        return scales
    full = weights[f"{group.source}.weight"] + group.offset
    stored = _eight_bits(full / scales - group.offset) + group.offset
    fits = (stored.abs() > 2.0**-14) & (stored * full > 0)
    return torch.where(fits, full / torch.where(fits, stored, 1.0), torch.ones_like(scales))


def _eight_bits(values: torch.Tensor) -> torch.Tensor:
    return values.bfloat16().float()


def fold(weights: Mapping[str, torch.Tensor], group: SmoothingGroup, scales: torch.Tensor) -> Weights:
    """The tensors that change when inputs of the group's matrices are divided by scales [channels] > 0."""
    changed = {}
    if group.offset is not None:
        name = f"{group.source}.weight"
        changed[name] = (weights[name] + group.offset) / scales - group.offset
    else:
        for part in ("weight", "bias"):
            name = f"{group.source}.{part}"
            if name in weights:
                changed[name] = weights[name] / (scales[:, None] if part == "weight" else scales)
    inputs = group.to_inputs(scales)
    for linear in group.linears:
        changed[f"{linear}.weight"] = weights[f"{linear}.weight"] * inputs
    return changed


def fold_stats(stats: InputStats, inputs: torch.Tensor) -> InputStats:
    """What the same tokens look like after division by inputs [K]."""
    return replace(
        stats,
        mean_abs=stats.mean_abs / inputs,
        max_abs=stats.max_abs / inputs,
        gram=stats.gram / inputs / inputs[:, None],
    )
