"""From a checkpoint to packed weights: one tensor at a time, so the peak is the packed form plus one tensor.

Knows the layout (`layout.py`) and hands rows of codes to the extension; knows no file format and no step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from lmdeploy.errors import ModelError
from lmdeploy.logging import get_logger
from lmdeploy.quant.tensors import Form, GroupedTensor, StoredMatrix, Tensor
from lmdeploy.turbomind.layout import (
    BF16,
    DENSE,
    FP16,
    INT8,
    INT8_MIN,
    TILE,
    W4_MIN,
    W4_ZERO,
    MatrixLayout,
    ModelLayout,
)
from lmdeploy.turbomind.placement import Order, Placement

if TYPE_CHECKING:
    from lmdeploy.turbomind._turbomind import Model

U16 = npt.NDArray[np.uint16]
_OTHER = "the PyTorch engine may compute it (PytorchEngineConfig, --backend pytorch)"
_NOT_FINITE, _ROUNDED, _ROUNDED_SCALES = 1, 2, 4  # notes of csrc/sources.h
# SourceForm of csrc/sources.h, and what it is packed to.
FORMS: dict[Form, tuple[int, int]] = {
    "Q4_0": (0, W4_ZERO),
    "Q4_1": (1, W4_MIN),
    "Q5_0": (2, INT8),
    "Q5_1": (3, INT8_MIN),
    "Q8_0": (4, INT8),
    "Q4_K": (5, W4_MIN),
    "Q5_K": (6, INT8_MIN),
    "Q6_K": (7, INT8),
    "words4": (8, W4_ZERO),
    "words8": (9, INT8),
    "int8": (10, INT8),
    "bfloat16": (11, BF16),
    "float16": (12, FP16),
    "float32": (13, BF16),
    "awq": (14, W4_ZERO),
    "gptq4": (15, W4_ZERO),
    "gptq8": (16, INT8),
}
_ROWS_AT_ONCE = 4096  # dense rows converted together; a multiple of a tile


class Readable(Protocol):
    """What is needed of a checkpoint (models.checkpoint.Checkpoint)."""

    def read(self, name: str) -> Tensor: ...
    def called(self, name: str) -> str: ...
    def stored_matrix(self, name: str) -> StoredMatrix | None: ...
    def release(self, name: str) -> None: ...


def load_weights(model: Model, checkpoint: Readable, layout: ModelLayout) -> None:
    """Read, check, pack and hand over every tensor of `layout`. ModelError names a tensor that is damaged."""
    Loader(model, checkpoint, layout).run()


class Loader(Placement):
    """One pass over a checkpoint; remembers which tensors lost digits, and in what order inputs come."""

    def __init__(self, model: Model, checkpoint: Readable, layout: ModelLayout) -> None:
        super().__init__(model, layout)
        self._model, self._checkpoint = model, checkpoint
        self._rounded: list[str] = []
        self._coarse: list[str] = []  # whose scales or minima lost digits
        self._orders: dict[str, Order] = {}  # of the tensors of the linear being loaded

    def run(self) -> None:
        super().run()
        _report(self._rounded, "values rounded to 16 bits")
        _report(self._coarse, "scales and minima of groups rounded to float16")

    def begin(self) -> None:
        self._orders.clear()

    def keep_order(self, index: int, role: str, count: int) -> None:
        self._model.set_order(index, role, self.order())

    def order(self) -> Order:
        """In which the tensors read last list their inputs; all must agree."""
        (first, order), *others = self._orders.items()
        for name, other in others:
            if not np.array_equal(order, other):
                raise ModelError(
                    f"{self._checkpoint.called(first)} lists its inputs in another order than {name!r}, which"
                    f" reads the same ones; {_OTHER}"
                )
        return order

    def vectors(self, names: Iterable[str], order: Order | None = None) -> int:
        """Biases or a norm, joined, in float32."""
        names = list(names)
        values = [np.asarray(self._checkpoint.read(name)).astype(np.float32) for name in names]
        for name, value in zip(names, values, strict=True):
            self._check(bool(np.isfinite(value).all()), name, value, "values")
        joined = np.concatenate(values)
        return self._model.add_vector(joined if order is None else joined[order])

    def matrix(self, layout: MatrixLayout, rows: Order | None = None) -> int:
        matrix = super().matrix(layout)
        row = 0
        for half, name in enumerate(layout.tensors):
            place = half if layout.run else row
            stored = (
                None if rows is not None or (row % TILE and not layout.run) else self._stored(name, layout)
            )
            row += (
                self._read(matrix, layout, name, place, rows)
                if stored is None
                else self._pack_stored(matrix, layout, name, stored, place)
            )
            self._checkpoint.release(name)
        return matrix

    def _stored(self, name: str, layout: MatrixLayout) -> StoredMatrix | None:
        """The tensor as its file holds it, if it is packed to what the layout says."""
        stored = self._checkpoint.stored_matrix(name)
        return stored if stored is not None and FORMS[stored.form][1] == layout.kind else None

    def _read(self, matrix: int, layout: MatrixLayout, name: str, place: int, rows: Order | None) -> int:
        tensor = self._checkpoint.read(name)
        if isinstance(tensor, GroupedTensor) and tensor.order is not None:
            self._orders[name] = tensor.order
        if rows is not None:
            tensor = tensor.rows(rows) if isinstance(tensor, GroupedTensor) else tensor[rows]
        self._pack(matrix, layout, name, tensor, place)
        return int(tensor.shape[0])

    def _pack_stored(
        self, matrix: int, layout: MatrixLayout, name: str, stored: StoredMatrix, place: int
    ) -> int:
        n, k = stored.shape
        notes = self._model.pack_file(
            matrix,
            FORMS[stored.form][0],
            k,
            _whole_groups(stored.group_size, k),
            stored.data,
            stored.rows,
            None if stored.scales is None else self._half(name, stored.scales),
            None if stored.zeros is None else np.ascontiguousarray(stored.zeros).reshape(-1),
            place,
            layout.run,
        )
        if notes & _NOT_FINITE:
            self._checkpoint.read(name)  # refuses what is not finite in the file itself
            raise self._too_large(name, "values or scales too large for the types")
        if notes & _ROUNDED:
            self._rounded.append(name)
        if notes & _ROUNDED_SCALES:
            self._coarse.append(name)
        return n

    def _pack(self, matrix: int, layout: MatrixLayout, name: str, tensor: Tensor, row: int) -> None:
        if isinstance(tensor, GroupedTensor):
            codes, parameters = self._grouped(layout, name, tensor)
            group = _whole_groups(tensor.group_size, layout.k)
            self._model.pack(matrix, layout.kind, group, codes, parameters, row, layout.run)
            return
        if layout.kind not in DENSE:
            raise ModelError(f"tensor {name!r} holds {tensor.dtype} values where its header says codes")
        # Alternating halves must come whole: where a row goes depends on how many there are.
        step = tensor.shape[0] if layout.run else _ROWS_AT_ONCE
        lost = False
        for begin in range(0, tensor.shape[0], step):
            part = tensor[begin : begin + step]
            bits, rounded = to_bfloat16(part) if layout.kind == BF16 else self._float16(name, part)
            exponent = 0x7F80 if layout.kind == BF16 else 0x7C00
            finite = not bool(((bits & exponent) == exponent).any())
            self._check(finite, name, part, "values too large for the 16 bits")
            lost = lost or rounded
            self._model.pack(matrix, layout.kind, 0, bits, (), row + begin, layout.run)
        if lost:
            self._rounded.append(name)

    def _float16(self, name: str, values: npt.NDArray[np.floating]) -> tuple[U16, bool]:
        bits, rounded = to_float16(values)
        overflows = np.isinf(bits.view(np.float16)) & np.isfinite(values)
        if overflows.any():
            raise ModelError(
                f"tensor {name!r} holds values beyond 65504, the largest of float16; load the model with"
                " dtype bfloat16"
            )
        return bits, rounded

    def _grouped(
        self, layout: MatrixLayout, name: str, tensor: GroupedTensor
    ) -> tuple[npt.NDArray[np.generic], tuple[npt.NDArray[np.generic], ...]]:
        """Codes and their scales, then zeros or minima, as the packer takes them."""
        with_mins = tensor.mins is not None
        kind = (INT8_MIN if with_mins else INT8) if tensor.bits == 8 else W4_MIN if with_mins else W4_ZERO
        if kind != layout.kind:
            raise ModelError(f"tensor {name!r} is of another kind than its header says")
        parameters: tuple[npt.NDArray[np.generic], ...] = (self._half(name, tensor.scales),)
        if tensor.mins is not None:
            parameters += (self._half(name, tensor.mins),)
        elif kind == W4_ZERO:
            zeros = np.zeros(tensor.scales.shape, np.uint8) if tensor.zeros is None else tensor.zeros
            parameters += (np.ascontiguousarray(zeros).reshape(-1),)
        return np.ascontiguousarray(tensor.codes), parameters

    def _half(self, name: str, values: npt.NDArray[np.floating]) -> U16:
        """float16 bits, flat."""
        with np.errstate(over="ignore"):
            half = np.ascontiguousarray(values, dtype=np.float16)
        finite = bool(np.isfinite(half).all())
        self._check(finite, name, values, "scales or minima of groups too large for float16")
        exact = values.dtype == np.float16 or np.array_equal(half.astype(values.dtype), values)
        if not exact and name not in self._coarse[-1:]:
            self._coarse.append(name)
        return half.view(np.uint16).reshape(-1)

    def _check(self, finite: bool, name: str, values: npt.NDArray[np.floating], what: str) -> None:
        """finite: what was made of `values`, which are scales or weights (`what`)."""
        if finite:
            return
        if not np.isfinite(values.astype(np.float32)).all():
            raise ModelError(f"{self._checkpoint.called(name)} holds NaN or infinity; fetch it again")
        raise self._too_large(name, what)

    def _too_large(self, name: str, what: str) -> ModelError:
        return ModelError(
            f"{self._checkpoint.called(name)} has {what} in which the native engine keeps them; {_OTHER}"
        )


def _whole_groups(group: int, k: int) -> int:
    """One scale for the whole row fits every group that the matrix may have."""
    return -(-group // 128) * 128 if group >= k else group


def _report(names: list[str], what: str) -> None:
    if names:
        more = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
        get_logger().info("%s%s: %s", names[0], more, what)


def to_bfloat16(values: npt.NDArray[np.floating]) -> tuple[U16, bool]:
    """bfloat16 bits (rounded to nearest even), and whether any value changed. NaN and infinity stay so."""
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    if values.dtype == bfloat16:
        return np.ascontiguousarray(values).view(np.uint16), False
    with np.errstate(over="ignore"):
        result = np.ascontiguousarray(values).astype(bfloat16)
    changed = not np.array_equal(result.astype(np.float32), values.astype(np.float32, copy=False))
    return result.view(np.uint16), changed


def to_float16(values: npt.NDArray[np.floating]) -> tuple[U16, bool]:
    """float16 bits (rounded to nearest even), and whether any value changed. NaN and infinity stay so."""
    if values.dtype == np.float16:
        return np.ascontiguousarray(values).view(np.uint16), False
    with np.errstate(over="ignore"):
        result = np.ascontiguousarray(values).astype(np.float32, copy=False).astype(np.float16)
    changed = not np.array_equal(result.astype(np.float32), values.astype(np.float32, copy=False))
    return result.view(np.uint16), changed
