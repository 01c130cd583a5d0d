"""Number formats of Hugging Face checkpoints: which one a config.json declares, and what its tensors mean.

One file per format. A format knows the public layout of one quantised matrix; it knows no family, no file and
no executor. GGUF's blocks are in `gguf_blocks.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lmdeploy.errors import ModelError
from lmdeploy.models.fields import shown
from lmdeploy.models.formats import awq, compressed_tensors, fp8, gptq, smooth_quant
from lmdeploy.models.formats.module import Options, Scheme

_SCHEMES: dict[str, Callable[[Options], Scheme]] = {
    "awq": awq.scheme,
    "gptq": gptq.scheme,
    "compressed-tensors": compressed_tensors.scheme,
    "fp8": fp8.scheme,
    "smooth_quant": smooth_quant.scheme,
}
QUANTISED_FORMATS = tuple(_SCHEMES)


def scheme_of(config: Mapping[str, Any], source: str) -> Scheme | None:
    """The format that quantization_config declares; None without one. ModelError for what is not read."""
    values = config.get("quantization_config")
    if values is None:
        return None
    method = values.get("quant_method") if isinstance(values, dict) else None
    if not isinstance(values, dict) or not isinstance(method, str) or method not in _SCHEMES:
        raise ModelError(
            f"{source}: quantization_config is of method {shown(method)}, which cannot be read (readable:"
            f" {', '.join(_SCHEMES)})."
        )
    return _SCHEMES[method](Options(values, source))
