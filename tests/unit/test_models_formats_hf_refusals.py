"""Quantised Hugging Face directories that are damaged, or of a kind that is not read: one clear line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import quantised_hf as q
from hf_schemes import AWQ, FP8_BLOCK, GPTQ, PACKED, check, compressed, quantised, read
from hypothesis import given, settings
from hypothesis import strategies as st

from lmdeploy.errors import ModelError
from lmdeploy.models.formats import scheme_of
from lmdeploy.models.registry import open_checkpoint


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**AWQ, "bits": 3}, "quantization_config.bits is 3"),
        ({**AWQ, "version": "gemv"}, "quantization_config.version is 'gemv'"),
        ({**AWQ, "zero_point": False}, "quantization_config.zero_point is False"),
        ({**AWQ, "group_size": 48}, "quantization_config.group_size is 48"),
        ({**AWQ, "group_size": None}, "quantization_config.group_size is None"),
        ({**GPTQ, "bits": 2}, "quantization_config.bits is 2"),
        ({**GPTQ, "sym": "no"}, "quantization_config.sym is 'no'"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "quantization_config.checkpoint_format is 'marlin'"),
        ({**GPTQ, "desc_act": "yes"}, "quantization_config.desc_act is 'yes'"),
        (compressed("nvfp4-pack-quantized"), "quantization_config.format is 'nvfp4-pack-quantized'"),
        (compressed("int-quantized"), "quantization_config.config_groups.group_0.weights.num_bits is 4"),
        (compressed("int-quantized", num_bits=8, strategy="block"), "group_0.weights.strategy is 'block'"),
        (compressed(num_bits=2), "quantization_config.config_groups.group_0.weights.num_bits is 2"),
        (compressed(type="float"), "quantization_config.config_groups.group_0.weights.type is 'float'"),
        ({**compressed(), "config_groups": {}}, "config_groups is missing or empty"),
        ({**FP8_BLOCK, "fmt": "e5m2"}, "quantization_config.fmt is 'e5m2'"),
        ({**FP8_BLOCK, "weight_block_size": [128]}, "quantization_config.weight_block_size is [128]"),
        (
            {**compressed(), "transform_config": {"config_groups": {"u": {"type": "hadamard"}}}},
            "quantization_config.transform_config turns activations at run time",
        ),
        (
            {**compressed(), "sparsity_config": {"format": "sparse-24-bitmask"}},
            "quantization_config.sparsity_config.format is 'sparse-24-bitmask'",
        ),
        ({"quant_method": "mxfp4"}, "is of method 'mxfp4', which cannot be read (readable: awq, gptq"),
        ({"quant_method": "smooth_quant", "quant_dtype": "float8_e5m2"}, "quant_dtype is 'float8_e5m2'"),
        ("int8", "is of method None"),
    ],
)
def test_variants_that_are_not_read_are_refused_by_name(config: Any, words: str, tmp_path: Path) -> None:
    path = q.llama(quantised).write(tmp_path, config)
    with pytest.raises(ModelError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert words in message
    assert "config.json" in message
    assert "\n" not in message


def lose(part: str) -> Callable[[dict[str, q.Array]], None]:
    return lambda stored: stored.pop(f"model.layers.1.mlp.up_proj.{part}") is None


def put(part: str, value: q.Array) -> Callable[[dict[str, q.Array]], None]:
    return lambda stored: stored.update({f"model.layers.1.mlp.up_proj.{part}": value})


def read_all(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    for name in checkpoint.names():
        checkpoint.read(name)


UP = "tensor 'model.layers.1.mlp.up_proj."


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lose("qweight"), UP + "weight' is missing"),
        (lose("qzeros"), UP + "qzeros' is missing"),
        (lose("scales"), UP + "scales' is missing"),
        (put("qzeros", np.zeros((2, 63), np.int32)), UP + "qzeros' has shape [2, 63]; [2, 64] is expected"),
        (put("scales", np.ones((4, 512), np.float16)), UP + "scales' has shape [4, 512]; [2, 512]"),
        (put("scales", np.ones((2, 512), np.int32)), UP + "scales' is of type I32; F16 or BF16 or F32"),
        (put("qweight", np.zeros((256, 64), np.int64)), UP + "qweight' is of type I64; I32 is expected"),
        (
            put("qweight", np.zeros((200, 64), np.int32)),
            "has shape [512, 200]; [512, 256] is expected",
        ),
        (
            put("scales", np.full((2, 512), np.nan, np.float16)),
            UP + "weight' holds values that are not finite",
        ),
        (put("weight", np.zeros((512, 256), np.float16)), UP + "weight' is there beside"),
        (put("g_idx", np.zeros(256, np.int32)), UP + "g_idx' has no place in a llama model"),
    ],
)
def test_damage_is_one_clear_line(
    damage: Callable[[dict[str, q.Array]], None], words: str, tmp_path: Path
) -> None:
    model = q.llama(quantised)
    damage(model.stored)
    path = model.write(tmp_path, AWQ)
    with pytest.raises(ModelError) as caught:
        read_all(path)
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    file = q.llama(quantised).write(tmp_path, AWQ) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="not a sound safetensors file"):
        open_checkpoint(tmp_path)


def test_fp8_parts_that_do_not_fit() -> None:
    codes, scale = q.e4m3(np.ones((256, 256))), np.ones((2, 2), np.float32)
    wide = codes.astype(ml_dtypes.float8_e5m2)
    for parts, words in (
        ({"weight": codes, "weight_scale_inv": scale[:1]}, "weight_scale_inv' has shape [1, 2]; [2, 2]"),
        ({"weight": wide, "weight_scale_inv": scale}, "weight' is of type F8_E5M2; F8_E4M3 is expected"),
    ):
        with pytest.raises(ModelError, match=re.escape(words)):
            read(FP8_BLOCK, parts)


def test_orders_that_cannot_be_are_refused() -> None:
    matrix = q.random_matrix(8, 256, 128, least_zero=1)
    uneven = np.arange(256) // 128
    uneven[0] = 1
    with pytest.raises(ModelError, match="g_idx' does not place 128 inputs in each group"):
        read({**GPTQ, "desc_act": True}, q.pack_gptq(g_idx=uneven)(*matrix))
    ordered = q.pack_gptq(g_idx=q.act_order(256, 128, 3))(*matrix)
    with pytest.raises(ModelError, match="g_idx' is not in order, although desc_act is false"):
        read(GPTQ, ordered)
    del ordered["g_idx"]
    with pytest.raises(ModelError, match="g_idx' is missing"):
        read({**GPTQ, "desc_act": True}, ordered)


def test_blocks_of_unknown_size_are_refused_by_the_first_tensor(tmp_path: Path) -> None:
    def blocks(name: str, n: int, k: int, seed: int) -> tuple[q.Parts, q.Array]:
        scale = np.ones((n // 32, k // 64), np.float32)
        return {"weight": q.e4m3(np.ones((n, k))), "weight_scale_inv": scale}, np.ones((n, k), np.float32)

    path = q.llama(blocks).write(tmp_path, {"quant_method": "fp8"})
    words = (
        r"0\.mlp\.down_proj\.weight_scale_inv' has shape \[8, 8\], scales of blocks, whose size .*_block_size"
    )
    with pytest.raises(ModelError, match=words):
        open_checkpoint(path)


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_beside_symmetric_weights(bits: int) -> None:
    """compressed-tensors: such as say nothing new are read, others refused."""
    middle = 1 << bits - 1
    for form, pack in (("pack-quantized", q.pack_compressed(bits)), ("int-quantized", q.store_bytes(False))):
        if form == "int-quantized" and bits == 4:
            continue
        symmetric = compressed(form, num_bits=bits, symmetric=True)
        symmetric |= {"sparsity_config": {"format": "dense"}, "transform_config": {}}
        matrix = q.random_matrix(16, 256, 128, bits, symmetric=True)
        check(symmetric, pack(*matrix), q.weights(*matrix))
        matrix[1][3, 1] = middle + 1
        with pytest.raises(ModelError, match="weight_zero_point' holds zero points other than the middle"):
            read(symmetric, pack(*matrix))


@pytest.mark.parametrize(("form", "stored_less"), [("gptq", 0), ("gptq_v2", 1)])
def test_versions_of_gptq_mixed_up_are_refused(form: str, stored_less: int) -> None:
    """All zero points one off the middle of symmetric weights; others are taken as they are."""
    matrix = q.random_matrix(16, 256, 128, symmetric=True)
    config = {**GPTQ, "sym": True, "checkpoint_format": form}
    other = "gptq_v2" if form == "gptq" else "gptq"
    with pytest.raises(ModelError, match=f"qzeros' holds only zero points of .* checkpoint_format '{other}'"):
        read(config, q.pack_gptq(stored_less=stored_less)(*matrix))
    matrix[1][3, 1] = 7
    check(config, q.pack_gptq(stored_less=1 - stored_less)(*matrix), q.weights(*matrix))


def test_zero_points_of_symmetric_weights_are_refused() -> None:
    matrix = q.random_matrix(8, 128, 128, 8, least_zero=1)
    with pytest.raises(ModelError, match="holds zero points other than 128, although sym is true"):
        read({**GPTQ, "bits": 8, "sym": True}, q.pack_gptq(8)(*matrix))


def test_model_format_follows_the_files(tmp_path: Path) -> None:
    path = q.llama(quantised).write(tmp_path / "awq", AWQ)
    for accepted in (None, "awq"):
        open_checkpoint(path, accepted).close()
    for other in ("hf", "gptq", "fp8", "gguf"):
        with pytest.raises(ModelError, match=f"model_format is '{other}', but the files are 'awq'"):
            open_checkpoint(path, other)
    plain = q.llama(lambda *_: None).write(tmp_path / "plain", AWQ)
    with pytest.raises(ModelError, match="declares 'awq' weights, but no tensor ends in qweight"):
        open_checkpoint(plain)


KEYS = sorted(
    {
        *AWQ,
        *GPTQ,
        *FP8_BLOCK,
        *compressed(),
        *PACKED,
        "checkpoint_format",
        "fmt",
        "weights",
        "block_structure",
    }
)
scalars = st.sampled_from(
    [None, True, False, -1, 0, 4, 8, 128, 1.5, "", "awq", "gptq", "gemm", "int", "float", "pack-quantized"]
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    method=st.sampled_from(["awq", "gptq", "compressed-tensors", "fp8"]),
    base=st.sampled_from([AWQ, GPTQ, FP8_BLOCK, compressed()]),
    changes=st.dictionaries(st.sampled_from(KEYS), values, max_size=3),
)
def test_any_description_is_a_scheme_or_one_line(method: str, base: Any, changes: Any) -> None:
    message = ""
    try:
        scheme_of({"quantization_config": {**base, **changes, "quant_method": method}}, "config.json")
    except ModelError as error:
        message = str(error)
    assert "\n" not in message
    assert not message or (message.startswith("config.json: quantization_config") and len(message) < 250)
