"""What the user asked of a quantisation, all concrete. No torch: parsers and the saved config read it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lmdeploy.quant.scheme import WeightScheme

Method = Literal["rtn", "awq", "gptq", "awq+gptq", "smooth_quant"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """method: rtn is plain rounding. scheme: of every matrix that is not kept. search_scale: search the ratio
    of each smoothing group; else 0.5. clip: search narrower ranges. act_order, damping: of gptq. keep: so
    many of the most sensitive layers get keep_bits (16: they stay as they are). target_bpw: bits per weight
    over all matrices of the layers, shared out by measured sensitivity; None: every matrix gets the scheme.
    head_bits: of embedding and output matrix, 16: they stay as they are.
    """

    method: Method = "awq+gptq"
    scheme: WeightScheme = field(default_factory=WeightScheme)
    search_scale: bool = True
    clip: bool = True
    act_order: bool = True
    damping: float = 0.01
    keep: int = 0
    keep_bits: Literal[8, 16] = 8
    target_bpw: float | None = None
    head_bits: Literal[8, 16] = 16
