"""Descriptions of quantised Hugging Face directories, and one matrix read by them."""

from __future__ import annotations

from typing import Any

import numpy as np
import quantised_hf as q

from lmdeploy.models.formats import scheme_of
from lmdeploy.models.formats.module import Header, Module
from lmdeploy.quant.tensors import GroupedTensor, Tensor

AWQ = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 128, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": False}
PACKED = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 128}


def compressed(form: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**PACKED, **weights}}},
        "ignore": ["lm_head"],
    }


def read(quantization: dict[str, Any], parts: q.Parts) -> tuple[Tensor, Any]:
    """One matrix through its scheme, and what its headers said."""
    scheme = scheme_of({"quantization_config": quantization}, "config.json")
    assert scheme is not None
    headers = {n: Header(v.shape, q._DTYPES[v.dtype.name], v.nbytes) for n, v in parts.items()}
    module = Module("here", "x", headers)
    matrix = scheme.matrix(module)
    scheme.stored(module, parts)  # refuses what reading refuses
    return scheme.read(module, parts), matrix


def check(quantization: dict[str, Any], parts: q.Parts, expected: q.Array, ordered: bool = False) -> None:
    tensor, info = read(quantization, parts)
    assert isinstance(tensor, GroupedTensor)
    assert info.shape == tensor.shape == expected.shape
    assert (info.bits, info.group_size) == (tensor.bits, tensor.group_size)
    assert info.ordered == ordered
    assert ordered <= (tensor.order is not None)
    assert tensor.scales.dtype in (np.float16, np.float32)
    assert np.array_equal(tensor.dequantize(), expected)


FP8_BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}


def quantised(name: str, n: int, k: int, seed: int) -> tuple[q.Parts, q.Array]:
    matrix = q.random_matrix(n, k, 128, seed=seed)
    return q.pack_awq(*matrix), q.weights(*matrix)
