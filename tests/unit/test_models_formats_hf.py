"""AWQ, GPTQ, compressed-tensors and fp8 checkpoints against independent packing: values bit for bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import quantised_hf as q
from hf_schemes import AWQ, FP8_BLOCK, GPTQ, check, compressed, quantised, read
from hypothesis import given, settings
from hypothesis import strategies as st

from lmdeploy.errors import ModelError
from lmdeploy.models.checkpoint import Checkpoint, Source
from lmdeploy.models.formats import scheme_of
from lmdeploy.models.formats.compressed_tensors import Bytes, PackQuantized
from lmdeploy.models.quantised_store import QuantisedStore
from lmdeploy.models.registry import load_spec, open_checkpoint
from lmdeploy.models.safetensors_dir import SafetensorsStore
from lmdeploy.quant.tensors import GroupedTensor

shapes = given(
    words=st.integers(1, 5),
    groups=st.integers(1, 4),
    group=st.sampled_from([32, 64, 128]),
    seed=st.integers(0, 999),
)
some = settings(max_examples=20, deadline=None, derandomize=True)


@some
@shapes
def test_awq(words: int, groups: int, group: int, seed: int) -> None:
    """Nibble order 0, 2, 4, 6, 1, 3, 5, 7 for weights and zero points."""
    matrix = q.random_matrix(8 * words, group * groups, group, seed=seed)
    check({**AWQ, "group_size": group}, q.pack_awq(*matrix), q.weights(*matrix))


def test_awq_by_hand() -> None:
    """One word: the bits of channel c are at the place of c in 0, 2, 4, 6, 1, 3, 5, 7."""
    parts = {
        "qweight": np.full((32, 1), 0x75316420, np.uint32).view(np.int32),
        "qzeros": np.zeros((1, 1), np.int32),
        "scales": np.ones((1, 8), np.float16),
    }
    tensor, _ = read({**AWQ, "group_size": 32}, parts)
    assert isinstance(tensor, GroupedTensor)
    assert tensor.dequantize()[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("version", [1, 2])
@some
@shapes
def test_gptq(version: int, words: int, groups: int, group: int, seed: int) -> None:
    """Version 1 stores zero - 1 (so that 16 is a zero point and 0 is none), version 2 the zero itself."""
    matrix = q.random_matrix(8 * words, group * groups, group, seed=seed, least_zero=2 - version)
    if version == 1:
        matrix[1].flat[0] = 16
    form = {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    parts = q.pack_gptq(stored_less=2 - version)(*matrix)
    check({**GPTQ, "group_size": group, **form}, parts, q.weights(*matrix))
    del parts["g_idx"]
    check({**GPTQ, "group_size": group, **form}, parts, q.weights(*matrix))


@pytest.mark.parametrize("bits", [4, 8])
@some
@shapes
def test_gptq_symmetric(bits: int, words: int, groups: int, group: int, seed: int) -> None:
    matrix = q.random_matrix(8 * words, group * groups, group, bits, symmetric=True, seed=seed)
    parts = q.pack_gptq(bits)(*matrix)
    check({**GPTQ, "bits": bits, "sym": True, "group_size": group}, parts, q.weights(*matrix))


@pytest.mark.parametrize("bits", [4, 8])
@some
@shapes
def test_gptq_act_order(bits: int, words: int, groups: int, group: int, seed: int) -> None:
    """Inputs sorted by group; the order comes with the tensor and dequantising puts them back."""
    n, k = 8 * words, group * (groups + 1)
    matrix = q.random_matrix(n, k, group, bits, symmetric=bits == 8, seed=seed, least_zero=1)
    g_idx = q.act_order(k, group, seed)
    parts = q.pack_gptq(bits, g_idx=g_idx)(*matrix)
    config = {**GPTQ, "bits": bits, "sym": bits == 8, "group_size": group, "desc_act": True}
    check(config, parts, q.weights(*matrix, g_idx), ordered=True)


def test_one_group_a_channel() -> None:
    """group_size -1: one scale for all inputs, whatever the order they were quantised in."""
    matrix = q.random_matrix(16, 96, 96, least_zero=1)
    for desc_act in (False, True):
        check({**GPTQ, "group_size": -1, "desc_act": desc_act}, q.pack_gptq()(*matrix), q.weights(*matrix))
    check({**AWQ, "group_size": -1}, q.pack_awq(*matrix), q.weights(*matrix))
    check(compressed(strategy="channel"), q.pack_compressed()(*matrix), q.weights(*matrix))


@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True)])
@some
@shapes
def test_compressed_tensors(
    bits: int, symmetric: bool, words: int, groups: int, group: int, seed: int
) -> None:
    n, k = 8 * words, group * (groups + 1)
    matrix = q.random_matrix(n, k, group, bits, symmetric, seed)
    config = compressed(num_bits=bits, symmetric=symmetric, group_size=group)
    check(config, q.pack_compressed(bits, symmetric)(*matrix), q.weights(*matrix))
    g_idx = q.act_order(k, group, seed)
    ordered = q.pack_compressed(bits, symmetric, g_idx)(*matrix)
    check(config, ordered, q.weights(*matrix, g_idx), ordered=True)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_scales_of_other_types_lose_nothing(dtype: Any) -> None:
    codes, zeros, scales = q.random_matrix(16, 128, 32)
    scales = (scales.astype(np.float32) * np.float32(1.001)).astype(dtype)
    check({**AWQ, "group_size": 32}, q.pack_awq(codes, zeros, scales), q.weights(codes, zeros, scales))
    check(
        compressed(group_size=32), q.pack_compressed()(codes, zeros, scales), q.weights(codes, zeros, scales)
    )


@pytest.mark.parametrize(
    ("config", "mark", "shape", "rows", "columns"),
    [
        (FP8_BLOCK, "weight_scale_inv", (3, 2), 128, 128),
        ({"quant_method": "fp8"}, "weight_scale", (), 300, 200),
        ({"quant_method": "fp8"}, "weight_scale_inv", (1,), 300, 200),
        (compressed("float-quantized", num_bits=8, type="float"), "weight_scale", (300, 1), 1, 200),
        (compressed("float-quantized", num_bits=8, type="float"), "weight_scale", (1,), 300, 200),
    ],
)
@pytest.mark.parametrize("scale_type", [np.float32, ml_dtypes.bfloat16])
def test_fp8(
    config: dict[str, Any], mark: str, shape: tuple[int, ...], rows: int, columns: int, scale_type: Any
) -> None:
    """Every code of the type, each weight rounded once more than float64 does."""
    n, k = 300, 200
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 255, (n, k)).astype(np.uint8)
    codes[codes == 0x7F] = 0  # NaN, as 0xff is
    values = codes.view(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(0.001, 0.1, shape).astype(scale_type)
    tensor, info = read(config, {"weight": values, mark: scale, "input_scale": np.ones(1, np.float32)})
    own = scale.astype(np.float64).reshape(shape if len(shape) == 2 else (1, 1))
    wide = np.repeat(np.repeat(own, rows, 0)[:n], columns, 1)[:, :k]
    exact = values.astype(np.float64) * wide
    assert not isinstance(tensor, GroupedTensor)
    assert (info.shape, info.kind, tensor.dtype) == ((n, k), "bfloat16", ml_dtypes.bfloat16)
    error = np.abs(tensor.astype(np.float64) - exact)
    assert (error <= np.abs(exact) * 2.0**-8).all()
    assert np.array_equal(tensor, exact.astype(np.float32).astype(ml_dtypes.bfloat16))


def no_gate(name: str, n: int, k: int, seed: int) -> tuple[q.Parts, q.Array] | None:
    return None if name.endswith("gate_proj") else quantised(name, n, k, seed)


def test_a_whole_model_and_its_headers(tmp_path: Path) -> None:
    """Names and shapes as if it were not quantised; modules left out of it are plain; headers are true."""
    model = q.llama(no_gate)
    path = model.write(tmp_path, {**AWQ, "modules_to_not_convert": ["gate_proj"]})
    checkpoint = open_checkpoint(path)
    total = 0
    for name in checkpoint.names():
        info, tensor = checkpoint.info(name), checkpoint.read(name)
        grouped = isinstance(tensor, GroupedTensor)
        assert info.shape == tensor.shape
        assert info.kind == ("int4_zero" if grouped else "float16")
        assert grouped == ("proj.weight" in name and "gate" not in name)
        total += info.file_bytes
    assert total == sum(value.nbytes for value in model.stored.values())
    for ours, theirs in (
        ("layers.1.attn.k_proj.weight", "model.layers.1.self_attn.k_proj.weight"),
        ("layers.0.ffn.down_proj.weight", "model.layers.0.mlp.down_proj.weight"),
    ):
        tensor = checkpoint.read(ours)
        assert isinstance(tensor, GroupedTensor)
        assert np.array_equal(tensor.dequantize(), model.dense[theirs])


def test_fused_projections_are_split_by_rows(tmp_path: Path) -> None:
    """A family whose file holds gate and up as one quantised matrix: any rows of it, in any order."""
    model = q.llama(quantised)
    spec = load_spec(model.write(tmp_path, AWQ))
    scheme = scheme_of({"quantization_config": AWQ}, "config.json")
    assert scheme is not None
    ffn = replace(spec.layers[0].ffn, intermediate_size=256, bias=False)
    order = np.arange(256, 512, dtype=np.intp)[::-1]
    table = {
        "layers.{i}.ffn.gate_proj.weight": Source(
            "model.layers.{i}.mlp.up_proj.weight", lambda s, i: slice(0, 256)
        ),
        "layers.{i}.ffn.up_proj.weight": Source("model.layers.{i}.mlp.up_proj.weight", lambda s, i: order),
    }
    shapes = dict(replace(spec, layers=(replace(spec.layers[0], ffn=ffn),)).tensors())

    class Fused:
        family, layers, norm = "test", spec.layers[:1], spec.norm
        tie_embeddings = False

        def tensors(self) -> Any:
            for part in ("gate", "up"):
                name = f"layers.0.ffn.{part}_proj.weight"
                yield name, shapes[name]

    store = QuantisedStore(SafetensorsStore(tmp_path), scheme)
    checkpoint = Checkpoint(Fused(), store, table, lambda name: True)  # type: ignore[arg-type]
    dense = model.dense["model.layers.0.mlp.up_proj.weight"]
    for part, rows in (("gate", slice(0, 256)), ("up", order)):
        name = f"layers.0.ffn.{part}_proj.weight"
        tensor, info = checkpoint.read(name), checkpoint.info(name)
        assert isinstance(tensor, GroupedTensor)
        assert np.array_equal(tensor.dequantize(), dense[rows])
        assert (info.shape, info.kind, info.group_size) == ((256, q.HIDDEN), "int4_zero", 128)


@some
@shapes
def test_eight_bits_with_zero_points(words: int, groups: int, group: int, seed: int) -> None:
    """As code * scale + minimum, without a rounding."""
    n, k = 8 * words, group * (groups + 1)
    matrix = q.random_matrix(n, k, group, 8, seed=seed, least_zero=1)
    expected, g_idx = q.weights(*matrix), q.act_order(k, group, seed)
    gptq = {**GPTQ, "bits": 8, "group_size": group}
    check(gptq, q.pack_gptq(8)(*matrix), expected)
    ordered = q.pack_gptq(8, g_idx=g_idx)(*matrix)
    check({**gptq, "desc_act": True}, ordered, q.weights(*matrix, g_idx), ordered=True)
    packed = compressed(num_bits=8, group_size=group)
    check(packed, q.pack_compressed(8)(*matrix), expected)
    check(packed, q.pack_compressed(8, g_idx=g_idx)(*matrix), q.weights(*matrix, g_idx), ordered=True)


@pytest.mark.parametrize("form", ["int-quantized", "naive-quantized"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("strategy", "groups"), [("tensor", 1), ("channel", 1), ("group", 4)])
def test_weights_stored_as_bytes(form: str, symmetric: bool, strategy: str, groups: int) -> None:
    """W8A8: signed codes and zero points, a scale for a matrix, a channel or a group."""
    codes, zeros, scales = q.random_matrix(24, 128, 128 // groups, 8, symmetric, seed=3)
    if strategy == "tensor":
        zeros, scales = np.full_like(zeros, zeros[0, 0]), np.full_like(scales, scales[0, 0])
    expected = q.weights(codes, zeros, scales)
    config = compressed(form, num_bits=8, symmetric=symmetric, strategy=strategy)
    for shape in {"tensor": [(), (1,), (1, 1)], "channel": [(24,), (24, 1)], "group": [(24, 4)]}[strategy]:
        parts = q.store_bytes(symmetric, shape)(codes, zeros, scales)
        check(config, parts, expected)
    for part, value in (("weight_scale", np.ones((24, 3), np.float16)), ("weight", codes)):
        with pytest.raises(ModelError, match=f"'x.{part}' (has shape|is of type)"):
            read(config, {**parts, part: value})


def test_old_gptq_directories_say_it_in_a_file_of_their_own(tmp_path: Path) -> None:
    """quantize_config.json as AutoGPTQ wrote it before transformers had quantization_config."""

    def gptq(name: str, n: int, k: int, seed: int) -> tuple[q.Parts, q.Array]:
        matrix = q.random_matrix(n, k, 128, seed=seed, least_zero=1)
        return q.pack_gptq()(*matrix), q.weights(*matrix)

    old = {
        **{"bits": 4, "group_size": 128, "damp_percent": 0.1, "desc_act": False, "sym": False},
        **{"true_sequential": True, "model_name_or_path": None, "model_file_base_name": "model"},
    }
    model = q.llama(gptq)
    path = model.write(tmp_path, None)
    (path / "quantize_config.json").write_text(json.dumps(old))
    for accepted in (None, "gptq"):
        checkpoint = open_checkpoint(path, accepted)
        tensor = checkpoint.read("layers.0.ffn.up_proj.weight")
        assert isinstance(tensor, GroupedTensor)
        assert np.array_equal(tensor.dequantize(), model.dense["model.layers.0.mlp.up_proj.weight"])
    for change, words in (
        ({"bits": 3}, r"quantize_config\.json: .*bits is 3"),
        ({"is_marlin_format": True}, r"quantize_config\.json: .*is_marlin_format is True"),
        ({"quant_method": "qqq"}, r"quantize_config\.json: .*method 'qqq'"),
    ):
        (path / "quantize_config.json").write_text(json.dumps({**old, **change}))
        with pytest.raises(ModelError, match=words):
            open_checkpoint(path)
    model.write(tmp_path, GPTQ)  # config.json is what counts where it says something
    open_checkpoint(path).close()


BY_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def fed(inputs: Any, form: str = "int-quantized", **weights: Any) -> dict[str, Any]:
    config = compressed(form, num_bits=8, **weights)
    config["config_groups"]["group_0"]["input_activations"] = inputs
    return config


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (fed(None), "none"),
        (fed(BY_TOKEN), "bytes"),
        (fed({**BY_TOKEN, "strategy": "tensor", "dynamic": False}), "other"),
        (fed({**BY_TOKEN, "type": "float"}, "pack-quantized"), "other"),
        ({"quant_method": "smooth_quant"}, "bytes"),
    ],
)
def test_how_inputs_are_rounded_is_read(config: dict[str, Any], expected: str) -> None:
    scheme = scheme_of({"quantization_config": config}, "config.json")
    assert isinstance(scheme, Bytes | PackQuantized) and scheme.inputs == expected


def test_what_is_rounded_is_said(tmp_path: Path) -> None:
    def fp8(name: str, n: int, k: int, seed: int) -> tuple[q.Parts, q.Array]:
        values = q.e4m3(np.random.default_rng(seed).standard_normal((n, k)))
        return {"weight": values, "weight_scale": np.float32([0.05])}, values.astype(np.float32) * 0.05

    path = q.llama(fp8).write(tmp_path / "fp8", {"quant_method": "fp8"})
    assert open_checkpoint(path).notes == ("fp8 weights are held as bfloat16, each rounded once",)
    assert open_checkpoint(q.llama(quantised).write(tmp_path / "awq", AWQ)).notes == ()
    for config, words in (
        ({**GPTQ, "bits": 8}, ["zero points"]),
        ({**GPTQ, "bits": 8, "sym": True}, []),
        (compressed(num_bits=8), ["zero points"]),
        (compressed("int-quantized", num_bits=8, symmetric=True), []),
        (fed(BY_TOKEN, symmetric=True), ["activations"]),
        (fed(BY_TOKEN), ["activations", "zero points"]),
    ):
        scheme = scheme_of({"quantization_config": config}, "config.json")
        assert scheme is not None
        assert len(scheme.notes) == len(words)
        assert all(word in note for word, note in zip(words, scheme.notes, strict=True))
