"""Weight values as the rest of the project sees them, whatever file they came from.

A checkpoint yields either a plain array (float32, float16 or bfloat16) or a `GroupedTensor`. Number formats
live here; file layouts (GGUF, AWQ, GPTQ) live in `models`, register layouts in the executors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class GroupedTensor:
    """Integers with one scale per `group_size` consecutive inputs of an output channel.

    4 bit: codes uint8 0..15; w = (code - zero) * scale with zeros 0..16, or w = code * scale + min.
    8 bit: codes int8 and w = code * scale; or codes uint8, and zeros or mins as with 4 bits.
    Shapes: codes [N, K]; scales, zeros, mins [N, ceil(K / group_size)]: the last group may be shorter. scales
    and mins are float16 or float32.
    order: None, or int32 [K]: column k of codes belongs to input order[k] (act-order: the file's groups are
    not consecutive inputs; sorted by group they are).
    """

    bits: int
    group_size: int
    codes: npt.NDArray[np.uint8] | npt.NDArray[np.int8]
    scales: npt.NDArray[np.floating]
    zeros: npt.NDArray[np.uint8] | None = None
    mins: npt.NDArray[np.floating] | None = None
    order: npt.NDArray[np.int32] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self) -> npt.NDArray[np.float32]:
        """float32 [N, K] in the order of the inputs, each value rounded once (product) or twice (product,
        sum)."""
        n, k = self.shape
        filled = np.pad(self.codes, ((0, 0), (0, -k % self.group_size)))
        codes = filled.reshape(n, -1, self.group_size).astype(np.float32)
        scales = self.scales.astype(np.float32)[..., None]
        if self.mins is not None:
            values = codes * scales + self.mins.astype(np.float32)[..., None]
        elif self.zeros is not None:
            values = (codes - self.zeros.astype(np.float32)[..., None]) * scales
        else:
            values = codes * scales
        values = values.reshape(n, -1)[:, :k]
        if self.order is None:
            return values
        result = np.empty_like(values)
        result[:, self.order] = values
        return result

    def rows(self, index: npt.NDArray[np.intp] | npt.NDArray[np.int32] | slice) -> GroupedTensor:
        """The same tensor with its output channels selected or reordered."""
        return GroupedTensor(
            self.bits,
            self.group_size,
            self.codes[index],
            self.scales[index],
            None if self.zeros is None else self.zeros[index],
            None if self.mins is None else self.mins[index],
            self.order,
        )


Form = Literal[
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K",
    "words4", "words8", "int8", "bfloat16", "float16", "float32", "awq", "gptq4", "gptq8",
]  # fmt: skip
BY_INPUTS = ("awq", "gptq4", "gptq8")


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix [N, K] as its file holds it, for executors that pack from there.

    form: a GGUF kind, a float type, int8, or int32 words of 4 or 8 bits from the lowest on: along the inputs
    of a row (words), along inputs, channels beside each other (gptq), along channels in AWQ order (awq).
    data: a view of the file, uint8 [rows, bytes of a row], or int32 words where inputs come first.
    rows: int32 [N], which row of data each channel is; None: all in order.
    scales, zeros: [N, K / group_size] for forms that have none of their own; float16 or float32, and uint8.
    """

    form: Form
    data: npt.NDArray[np.generic]
    shape: tuple[int, int]
    group_size: int
    rows: npt.NDArray[np.int32] | None = None
    scales: npt.NDArray[np.floating] | None = None
    zeros: npt.NDArray[np.uint8] | None = None

    def select(self, index: npt.NDArray[np.intp] | slice) -> StoredMatrix | None:
        """Some channels of it; None where the form cannot be cut so."""
        assert self.rows is None
        if not isinstance(index, slice):
            if self.scales is not None:
                return None
            rows = np.ascontiguousarray(index, np.int32)
            return replace(self, rows=rows, shape=(len(rows), self.shape[1]))
        begin, end, step = index.indices(self.shape[0])
        per_word = 8 if self.form == "awq" else 1
        if step != 1 or begin % per_word or end % per_word:
            return None
        words = slice(begin // per_word, end // per_word)
        return replace(
            self,
            data=self.data[:, words] if self.form in BY_INPUTS else self.data[words],
            shape=(end - begin, self.shape[1]),
            scales=None if self.scales is None else self.scales[index],
            zeros=None if self.zeros is None else self.zeros[index],
        )


Tensor = npt.NDArray[np.floating] | GroupedTensor
