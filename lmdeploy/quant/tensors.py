"""Weight values as the rest of the project sees them, whatever file they came from.

A checkpoint yields either a plain array (float32, float16 or bfloat16) or a `GroupedTensor`. Number formats
live here; file layouts (GGUF, AWQ, GPTQ) live in `models`, register layouts in the executors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class GroupedTensor:
    """Integers with one scale per `group_size` consecutive inputs of an output channel.

    4 bit: codes uint8 0..15; w = (code - zero) * scale with zeros 0..16, or w = code * scale + min.
    8 bit: codes int8 and w = code * scale; or, with mins, codes uint8 and w = code * scale + min.
    Shapes: codes [N, K]; scales, zeros, mins [N, K / group_size]. scales and mins are float16 or float32.
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
        codes = self.codes.reshape(n, -1, self.group_size).astype(np.float32)
        scales = self.scales.astype(np.float32)[..., None]
        if self.mins is not None:
            values = codes * scales + self.mins.astype(np.float32)[..., None]
        elif self.zeros is not None:
            values = (codes - self.zeros.astype(np.float32)[..., None]) * scales
        else:
            values = codes * scales
        values = values.reshape(n, k)
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


Tensor = npt.NDArray[np.floating] | GroupedTensor
