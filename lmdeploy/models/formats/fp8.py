"""8-bit floats (e4m3) with a scale per matrix, per output channel or per block: read as bfloat16.

    weight float8_e4m3fn [N, K];  w = value * scale
    weight_scale_inv (or weight_scale): one number, [N, 1], or [ceil(N / rows), ceil(K / columns)] of blocks

A product has more digits than bfloat16 keeps: each weight is rounded, by at most 2^-8 of itself. Scales of
activations are not used: activations stay in the engine's own precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from lmdeploy.models.fields import shown
from lmdeploy.models.formats.module import FLOATS, Array, Matrix, Module, Options
from lmdeploy.quant.scheme import InputRounding
from lmdeploy.quant.tensors import StoredMatrix, Tensor

UNUSED = ("input_scale", "activation_scale", "k_scale", "v_scale", "output_scale")
_ROWS_AT_ONCE = 1024  # so that reading takes little more memory than its result
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True, slots=True)
class Fp8:
    """block: rows and columns per scale, None when one scale serves a channel or the matrix."""

    name: str
    block: tuple[int, int] | None
    inputs: InputRounding = "other"
    block_key: str = "weight_block_size"
    marks: tuple[str, ...] = ("weight_scale_inv", "weight_scale")
    order_part: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        return ("fp8 weights are held as bfloat16, each rounded once",)

    @property
    def parts(self) -> tuple[str, ...]:
        return ("weight", *self.marks, *UNUSED)

    def matrix(self, module: Module) -> Matrix:
        n, k = module.plane("weight", ("F8_E4M3",))
        mark = self._mark(module)
        module.check(mark, FLOATS)
        shape = module.headers[mark].shape
        fits: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (n,), (n, 1))
        if self.block is not None:
            fits = ((-(-n // self.block[0]), -(-k // self.block[1])),)
        if shape not in fits and self.block is None and len(shape) == 2:
            raise module.fail(
                mark,
                f"has shape {list(shape)}, scales of blocks, whose size quantization_config must give"
                f" ({self.block_key})",
            )
        if shape not in fits:
            raise module.fail(mark, f"has shape {list(shape)}; {list(fits[-1])} is expected")
        return Matrix((n, k), "bfloat16", 16, 0, inputs=self.inputs)

    def _mark(self, module: Module) -> str:
        return next(mark for mark in self.marks if mark in module.headers)

    def read(self, module: Module, parts: Mapping[str, Array]) -> Tensor:
        codes, scale = parts["weight"], parts[self._mark(module)].astype(np.float32)
        n, k = codes.shape
        rows, columns = self.block or (1 if scale.size == n else n, k)
        scale = scale.reshape(-(-n // rows), -(-k // columns))
        result = np.empty((n, k), _BFLOAT16)
        for begin in range(0, n, _ROWS_AT_ONCE):
            part = codes[begin : begin + _ROWS_AT_ONCE].astype(np.float32)
            own = scale[(begin + np.arange(len(part))) // rows]
            part *= np.repeat(own, columns, axis=1)[:, :k]
            result[begin : begin + len(part)] = part.astype(_BFLOAT16)
        return result

    def stored(self, module: Module, parts: Mapping[str, Array]) -> StoredMatrix | None:
        return None


def block_shape(options: Options, key: str) -> tuple[int, int] | None:
    """[rows, columns] of a block, or None when absent or null."""
    value = options.values.get(key)
    if value is None:
        return None
    sound = isinstance(value, list) and len(value) == 2 and all(type(x) is int and x > 0 for x in value)
    if not sound:
        raise options.fail(key, f"is {shown(value)}; two whole numbers are expected")
    return value[0], value[1]


def scheme(options: Options) -> Fp8:
    """ModelError for a variant that is not read."""
    options.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    return Fp8("fp8", block_shape(options, "weight_block_size"))
