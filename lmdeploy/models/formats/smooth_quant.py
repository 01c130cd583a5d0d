"""W8A8 as LMDeploy up to 0.16 saves it: 8 bits with a scale for each output channel.

    weight int8 or float8_e4m3fn [N, K];  scale float32 [N, 1];  w = code * scale

Activations are meant to be rounded to 8 bits, a scale for each token; see compressed_tensors.py.
"""

from __future__ import annotations

from lmdeploy.models.formats.compressed_tensors import Bytes
from lmdeploy.models.formats.fp8 import Fp8
from lmdeploy.models.formats.module import Options, Scheme

_NAME, _MARKS = "smooth_quant", ("scale",)


def scheme(options: Options) -> Scheme:
    """ModelError for a variant that is not read."""
    kind = options.one_of("quant_dtype", ("int8", "fp8", "float8_e4m3fn"), "int8")
    if kind == "int8":
        return Bytes(True, "bytes", _NAME, _MARKS, ("weight", *_MARKS))
    return Fp8(_NAME, None, "other", marks=_MARKS)
