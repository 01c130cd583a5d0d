"""The order in which the weights of a model lie in memory, and which part of the model sees which.

`Placement` takes them as they lie there already; `weights.Loader` fills each place. Knows no values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lmdeploy.turbomind.layout import LayerLayout, LinearLayout, MatrixLayout, ModelLayout

Order = npt.NDArray[np.int32]


class Target(Protocol):
    """What takes the places: the native model, or a record of them. Matrices and vectors are numbered."""

    def add_matrix(self, kind: int, n: int, k: int, group: int) -> int: ...
    def place_vector(self, count: int) -> int: ...
    def place_order(self, layer: int, role: str, count: int) -> None: ...
    def set_linear(self, layer: int, role: str, matrices: Sequence[int], bias: int) -> None: ...
    def set_vector(self, layer: int, role: str, vector: int) -> None: ...
    def set_embedding(self, matrix: int) -> None: ...


class Placement:
    """One walk over a layout, always in the same order."""

    def __init__(self, target: Target, layout: ModelLayout) -> None:
        self._target, self._layout = target, layout

    def run(self) -> None:
        """Everything, in the order of the layout."""
        layout, target = self._layout, self._target
        self.begin()
        embedding = self.matrix(layout.embedding)
        target.set_embedding(embedding)
        for index, layer in enumerate(layout.layers):
            self._layer(index, layer)
        self.begin()
        head = embedding if layout.head is None else self.matrix(layout.head)
        target.set_linear(0, "head", [head], -1)
        if layout.head_ordered:
            self.keep_order(0, "head", layout.head_input.k)
        target.set_vector(0, "final_norm", self.vectors(["norm.weight"]))

    def _layer(self, index: int, layer: LayerLayout) -> None:
        for role, linear in (("qkv", layer.qkv), ("o", layer.o), ("down", layer.down)):
            self._linear(index, role, linear, self.vectors(linear.biases) if linear.biases else -1)
        # What `down` reads is computed in its order: the channels of gate and up move, not the values.
        order = self.order() if layer.down.ordered else None
        self._linear(index, "gate_up", layer.gate_up, -1, order)
        for role, name in zip(("gate_bias", "up_bias"), layer.gate_up.biases, strict=False):
            self._target.set_vector(index, role, self.vectors([name], order))
        for role, name in layer.vectors.items():
            self._target.set_vector(index, role, self.vectors([name]))

    def _linear(
        self, index: int, role: str, linear: LinearLayout, bias: int, rows: Order | None = None
    ) -> None:
        self.begin()
        matrices = [self.matrix(matrix, rows) for matrix in linear.matrices]
        self._target.set_linear(index, role, matrices, bias)
        if linear.ordered and role != "down":
            self.keep_order(index, role, linear.input.k)

    def begin(self) -> None:
        """Of another linear."""

    def matrix(self, layout: MatrixLayout, rows: Order | None = None) -> int:
        """The next place for a matrix; `rows` reorders what comes in."""
        return self._target.add_matrix(layout.kind, layout.n, layout.k, layout.group)

    def vectors(self, names: Iterable[str], order: Order | None = None) -> int:
        """The next place for biases or a norm, joined."""
        return self._target.place_vector(sum(self._layout.vector_lengths[name] for name in names))

    def order(self) -> Order | None:
        """In which the linear's tensors list its inputs, if there are values."""
        return None

    def keep_order(self, index: int, role: str, count: int) -> None:
        """The next place for that order."""
        self._target.place_order(index, role, count)


class _Record:
    """Every call of a placement, as text."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._count = 0

    def __getattr__(self, name: str) -> Any:
        def call(*values: object) -> int:
            self.calls.append(f"{name}{values}")
            self._count += 1
            return self._count

        return call


def placement_digest(layout: ModelLayout) -> str:
    """A name that changes when anything of a layout goes to another place or takes other tensors."""
    record = _Record()
    Placement(record, layout).run()
    tensors = [f"{matrix.tensors} {matrix.run}" for matrix in layout.matrices()]
    text = "\n".join([*record.calls, *tensors, str(layout.nbytes)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
