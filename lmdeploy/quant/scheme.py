"""How a matrix is to be rounded: bits, group, with or without zero point; and what that costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WHOLE_ROW = -1
# What a file says is done to a matrix's inputs: nothing; 8 bits, a symmetric scale for each token; or other
InputRounding = Literal["none", "bytes", "other"]


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """Integers of `bits` (4 or 8) with one scale for each `group_size` consecutive inputs of a channel.

    group_size: WHOLE_ROW is one group for each channel; where it does not divide the inputs, the last group
    is shorter. symmetric: no zero point (codes are centred); else one zero point of `bits` for each group, of
    at least `least_zero` (0 or 1). ordered: groups are of inputs of like size, not of neighbours (act-order).
    """

    bits: int = 4
    group_size: int = 128
    symmetric: bool = False
    least_zero: int = 0
    ordered: bool = False

    def groups(self, inputs: int) -> int:
        return 1 if self.group_size == WHOLE_ROW else -(-inputs // self.group_size)

    def bits_per_weight(self, inputs: int) -> float:
        """Codes, 16-bit scales and zero points of a matrix with so many inputs, by weight."""
        extra = 16 + (0 if self.symmetric else self.bits)
        return self.bits + extra * self.groups(inputs) / inputs
