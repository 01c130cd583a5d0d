"""How finely activations are rounded before they meet quantised weights: the engine option `accuracy`.

A span of a row's values is held in one int8 plane or in two (csrc/kernels/table.h). The rule looks at the
span alone, so a row's result does not depend on what else is in the batch. Knows no kernels.
"""

from __future__ import annotations

from typing import Literal

Accuracy = Literal["exact", "auto", "fast"]
ALWAYS, NEVER = 0.0, float("inf")

# Spans whose largest magnitude exceeds this many times their root mean square have a second plane
# (docs/decisions/0009-accuracy.md and 0015 say what other values do).
THRESHOLDS: dict[Accuracy, float] = {"exact": ALWAYS, "auto": 4.0, "fast": 9.0}
