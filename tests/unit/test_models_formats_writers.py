"""What is written is what independent packers of the public layouts make (K39), and reads back equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import quantised_hf as q
from hf_schemes import read

from lmdeploy.errors import ConfigError, ModelError
from lmdeploy.models.formats.writers import WRITERS
from lmdeploy.quant.scheme import WHOLE_ROW, WeightScheme
from lmdeploy.quant.tensors import GroupedTensor

F16 = np.dtype(np.float16)


def matrix(scheme: WeightScheme, n: int, k: int, ordered: bool = False) -> tuple[GroupedTensor, Any]:
    """A tensor and its codes, zero points and scales as the packers take them (unsigned)."""
    rng = np.random.default_rng(n + k)
    top, groups = (1 << scheme.bits) - 1, scheme.groups(k)
    codes = rng.integers(0, top + 1, (n, k)).astype(np.uint8)
    zeros = rng.integers(scheme.least_zero, top + 1, (n, groups)).astype(np.uint8)
    if scheme.symmetric:
        zeros[:] = (top + 1) // 2
    scales = rng.uniform(0.001, 0.1, (n, groups)).astype(np.float16)
    group = k if scheme.group_size == WHOLE_ROW else scheme.group_size
    order = rng.permutation(k).astype(np.int32) if ordered else None
    if scheme.symmetric and scheme.bits == 8:
        tensor = GroupedTensor(8, group, (codes ^ 0x80).view(np.int8), scales, order=order)
    else:
        tensor = GroupedTensor(scheme.bits, group, codes, scales, zeros, order=order)
    return tensor, (codes, zeros, scales)


CASES = [
    ("awq", WeightScheme(4, 128, False), q.pack_awq),
    ("awq", WeightScheme(4, 32, True), q.pack_awq),
    ("awq", WeightScheme(4, WHOLE_ROW, False), q.pack_awq),
    ("gptq", WeightScheme(4, 128, True), q.pack_gptq(4)),
    ("gptq", WeightScheme(4, 64, True), q.pack_gptq(4)),
    ("gptq", WeightScheme(4, 64, False, least_zero=1), q.pack_gptq(4)),
    ("gptq", WeightScheme(8, 128, False, least_zero=1), q.pack_gptq(8)),
    ("gptq_v2", WeightScheme(4, 128, False), q.pack_gptq(4, 0)),
    ("gptq", WeightScheme(8, 128, True), q.pack_gptq(8)),
    ("gptq_v2", WeightScheme(8, 128, False), q.pack_gptq(8, 0)),
    ("compressed-tensors", WeightScheme(4, 128, False), q.pack_compressed(4)),
    ("compressed-tensors", WeightScheme(4, 64, True), q.pack_compressed(4, True)),
    ("compressed-tensors", WeightScheme(8, 128, True), q.pack_compressed(8, True)),
    ("compressed-tensors", WeightScheme(8, WHOLE_ROW, False), q.pack_compressed(8)),
    ("w8a8", WeightScheme(8, WHOLE_ROW, True), q.store_bytes()),
]


@pytest.mark.parametrize(("name", "scheme", "pack"), CASES)
def test_bytes_are_those_of_the_public_layout(name: str, scheme: WeightScheme, pack: Any) -> None:
    writer = WRITERS[name]
    tensor, given = matrix(scheme, 64, 256)
    assert writer.refusal(scheme, (64, 256)) is None
    parts, expected = writer.encode(tensor, scheme.symmetric, F16), pack(*given)
    assert set(parts) == set(expected)
    for part, value in expected.items():
        assert parts[part].dtype == value.dtype and np.array_equal(parts[part], value), part


@pytest.mark.parametrize(("name", "scheme", "pack"), CASES)
@pytest.mark.parametrize("k", [256, 320, 576])
def test_what_is_written_reads_back_equal(name: str, scheme: WeightScheme, pack: Any, k: int) -> None:
    """Also where the last group is shorter."""
    writer, (tensor, _) = WRITERS[name], matrix(scheme, 64, k)
    config = writer.config({"model.layers.0.x": scheme, "lm_head": None})
    back, _ = read(config, writer.encode(tensor, scheme.symmetric, F16))
    assert isinstance(back, GroupedTensor)
    difference = np.abs(back.dequantize() - tensor.dequantize()).max()
    assert difference <= (1e-6 if scheme.bits == 8 else 0.0)  # 8-bit zero points become minima


def test_act_order_comes_back_as_the_same_values() -> None:
    scheme = WeightScheme(4, 64, True, ordered=True)
    tensor, _ = matrix(scheme, 64, 256, ordered=True)
    config = WRITERS["gptq"].config({"x": scheme})
    back, info = read(config, WRITERS["gptq"].encode(tensor, True, F16))
    assert info.ordered and isinstance(back, GroupedTensor)
    assert np.array_equal(back.dequantize(), tensor.dequantize())


def test_what_a_format_cannot_hold_is_said() -> None:
    assert "4 bits" in str(WRITERS["awq"].refusal(WeightScheme(8), (64, 128)))
    assert "8 output channels" in str(WRITERS["awq"].refusal(WeightScheme(), (60, 128)))
    assert "8 inputs" in str(WRITERS["gptq_v2"].refusal(WeightScheme(), (64, 100)))
    for name in ("awq", "compressed-tensors", "w8a8"):
        assert "groups of neighbours" in str(WRITERS[name].refusal(WeightScheme(ordered=True), (64, 128)))
    assert "zero point of 0" in str(WRITERS["gptq"].refusal(WeightScheme(), (64, 128)))
    assert "8 symmetric bits" in str(WRITERS["w8a8"].refusal(WeightScheme(), (64, 128)))
    with pytest.raises(ConfigError, match="compressed-tensors"):
        WRITERS["awq"].config({"a": WeightScheme(), "b": WeightScheme(4, 64)})


def test_modules_with_schemes_of_their_own() -> None:
    first, second = WeightScheme(4, 128, True), WeightScheme(8, 128, True)
    config = WRITERS["compressed-tensors"].config({"a": first, "b": first, "x": second, "lm_head": None})
    tensor, _ = matrix(second, 64, 256)
    back, _ = read(config, WRITERS["compressed-tensors"].encode(tensor, True, F16))  # the module is "x"
    assert isinstance(back, GroupedTensor) and back.bits == 8
    assert np.array_equal(back.dequantize(), tensor.dequantize())
    assert config["ignore"] == ["lm_head"]


def test_modules_of_gptq_with_options_of_their_own() -> None:
    """`dynamic` takes patterns of whole names, as the package that defines it matches them."""
    first, second = WeightScheme(4, 128, False), WeightScheme(8, 64, True)
    writer = WRITERS["gptq_v2"]
    config = writer.config({"a.0": first, "x": second, "lm_head": None})
    assert config["dynamic"] == {"-:^lm_head$": {}, "+:^x$": {"bits": 8, "group_size": 64, "sym": True}}
    tensor, _ = matrix(second, 64, 256)
    back, info = read(config, writer.encode(tensor, True, F16))  # the module is "x"
    assert info.bits == 8 and isinstance(back, GroupedTensor)
    assert np.array_equal(back.dequantize(), tensor.dequantize())
    with pytest.raises(ModelError, match=r"dynamic\.\+:y is no object"):
        read({**config, "dynamic": {"+:y": 8}}, writer.encode(tensor, True, F16))


def test_an_embedding_is_named_beside_linear_modules() -> None:
    """Of its own kind, it is no target of `Linear`; the output matrix is, quantised or not."""
    scheme, writer = WeightScheme(8, 128, True), WRITERS["compressed-tensors"]
    config = writer.config({"model.layers.0.x": scheme, "model.embed": scheme})
    assert config["config_groups"]["group_0"]["targets"] == ["Linear", "model.embed"]
    assert config["ignore"] == ["lm_head"]
    config = writer.config({"model.layers.0.x": scheme, "lm_head": scheme})
    assert config["config_groups"]["group_0"]["targets"] == ["Linear", "lm_head"]
    assert config["ignore"] == []
