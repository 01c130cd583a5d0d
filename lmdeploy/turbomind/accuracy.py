"""How finely activations are rounded before they meet quantised weights: the engine option `accuracy`.

A group of a row's values is held in one int8 plane or in two (csrc/kernels/table.h). Here is decided, for
each projection, from which ratio of the group's largest value to its root mean square on it gets the second
one. The rule looks at the group alone, so a row's result does not depend on what else is in the batch. Knows
no kernels.
"""

from __future__ import annotations

from typing import Literal, get_args

Accuracy = Literal["exact", "auto", "fast"]
ACCURACIES: tuple[Accuracy, ...] = get_args(Accuracy)
ALWAYS, NEVER = 0.0, float("inf")

# Projections by what they read: normed values, attention's output, the gated product, the last normed values.
ROLES = ("qkv", "o", "gate_up", "down", "head")
_AUTO = {"qkv": 5.5, "o": 5.5, "gate_up": 5.5, "down": 10.0, "head": ALWAYS}


def threshold(accuracy: Accuracy, role: str) -> float:
    """Groups whose largest magnitude exceeds this many times their root mean square have a second plane."""
    if accuracy == "auto":
        return _AUTO[role]
    return ALWAYS if accuracy == "exact" else NEVER
