"""Quantised Llamas end to end: native engine and reference against transformers with the dequantised weights.

The weights are those that independent packing code started from (tests/support/quantised_hf.py), so that a
fault in unpacking, in the order of inputs or in the kernels shows in the logits.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantised_hf as q
import torch
from executors import make_torch
from native_case import relative_rms, sequence_logits
from packing import both_images
from transformers import LlamaConfig, LlamaForCausalLM

from lmdeploy import TurbomindEngineConfig
from lmdeploy.config import EngineConfig
from lmdeploy.errors import ModelError
from lmdeploy.models.reference import Reference
from lmdeploy.models.registry import open_checkpoint
from lmdeploy.runtime.resolve import resolve
from lmdeploy.turbomind.executor import NativeConfig, TurbomindExecutor
from lmdeploy.turbomind.plan import Limits, native_plan

IDS = np.random.default_rng(3).integers(0, q.VOCAB, 60).astype(np.int32)
LIMITS = Limits(max_rows=4, max_step_tokens=64, max_context=128, block_size=16, num_threads=2)
TOLERANCE = 2e-3
Quantise = Callable[[str, int, int, int], "tuple[q.Parts, q.Array] | None"]


def integers(
    pack: Callable[[q.Array | None], Callable[..., q.Parts]], group: int, act_order: bool = False, **form: Any
) -> Quantise:
    """Random matrices; those that share an input share its order, as calibration on that input gives it.

    group 0: one for each output channel.
    """

    def quantise(name: str, n: int, k: int, seed: int) -> tuple[q.Parts, q.Array]:
        matrix = q.random_matrix(n, k, group or k, seed=seed, **form)
        same_input = {"self_attn.q": 0, "self_attn.k": 0, "self_attn.v": 0, "mlp.gate": 1, "mlp.up": 1}
        key = next((i for part, i in same_input.items() if part in name), 2 + seed % 100)
        g_idx = q.act_order(k, group, 1000 * (seed // 100) + key) if act_order else None
        return pack(g_idx)(*matrix), q.weights(*matrix, g_idx)

    return quantise


def gptq(bits: int = 4, less: int = 1) -> Callable[[q.Array | None], Callable[..., q.Parts]]:
    return lambda g_idx: q.pack_gptq(bits, less, g_idx)


def packed(bits: int = 4, symmetric: bool = False) -> Callable[[q.Array | None], Callable[..., q.Parts]]:
    return lambda g_idx: q.pack_compressed(bits, symmetric, g_idx)


def as_bytes(symmetric: bool = True) -> Callable[[q.Array | None], Callable[..., q.Parts]]:
    return lambda g_idx: q.store_bytes(symmetric)


def fp8_blocks(name: str, n: int, k: int, seed: int) -> tuple[q.Parts, q.Array]:
    rng = np.random.default_rng(seed)
    values = q.e4m3(rng.standard_normal((n, k)) * 50)
    scale = (rng.uniform(0.5, 1, (n // 128, k // 128)) / 50 * k**-0.5).astype(np.float32)
    dense = values.astype(np.float32) * np.repeat(np.repeat(scale, 128, 0), 128, 1)
    return {"weight": values, "weight_scale_inv": scale}, dense


def but(quantise: Quantise, *plain: str) -> Quantise:
    return lambda name, *rest: None if name.endswith(plain) else quantise(name, *rest)


def config(method: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": method, "bits": 4, "group_size": 128, **more}


def compressed(
    bits: int, symmetric: bool, form: str = "pack-quantized", strategy: str = "group"
) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy}
    activations = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"weights": weights, "input_activations": activations}},
    }


def awq(_: q.Array | None) -> Callable[..., q.Parts]:
    return q.pack_awq


ALL_BUT_DOWN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")
V2 = {"checkpoint_format": "gptq_v2"}
CASES: dict[str, tuple[Quantise, dict[str, Any]]] = {
    "awq 128": (integers(awq, 128), config("awq")),
    "awq 64": (integers(awq, 64), config("awq", group_size=64)),
    "awq 32": (integers(awq, 32), config("awq", group_size=32)),
    "awq, some plain": (
        but(integers(awq, 64), "v_proj", "up_proj", "o_proj"),
        config("awq", group_size=64, modules_to_not_convert=["v_proj", "up_proj", "o_proj"]),
    ),
    "gptq": (integers(gptq(), 128, least_zero=1), config("gptq")),
    "gptq v2": (integers(gptq(less=0), 64), config("gptq", group_size=64, **V2)),
    "gptq symmetric": (integers(gptq(), 128, symmetric=True), config("gptq", sym=True)),
    "gptq act-order": (
        integers(gptq(), 64, True, least_zero=1),
        config("gptq", group_size=64, desc_act=True),
    ),
    "gptq act-order, some plain": (
        but(integers(gptq(), 32, True, least_zero=1), "down_proj", "q_proj", "k_proj", "v_proj"),
        config("gptq", group_size=32, desc_act=True),
    ),
    "gptq act-order, down_proj alone": (
        but(integers(gptq(), 32, True, least_zero=1), *ALL_BUT_DOWN),
        config("gptq", group_size=32, desc_act=True),
    ),
    "gptq 8 bit": (
        integers(gptq(8), 128, True, bits=8, symmetric=True),
        config("gptq", bits=8, sym=True, desc_act=True),
    ),
    "gptq 8 bit with zero points, act-order": (
        integers(gptq(8), 64, True, bits=8, least_zero=1),
        config("gptq", bits=8, sym=False, group_size=64, desc_act=True),
    ),
    "compressed-tensors 8 bit with zero points": (
        integers(packed(8), 128, bits=8),
        compressed(8, False),
    ),
    "compressed-tensors W8A8": (
        integers(as_bytes(), 0, bits=8, symmetric=True),
        compressed(8, True, "int-quantized", "channel"),
    ),
    "compressed-tensors W8A8 with zero points, some plain": (
        but(integers(as_bytes(False), 0, bits=8), "v_proj", "up_proj", "o_proj"),
        compressed(8, False, "int-quantized", "channel"),
    ),
    "compressed-tensors": (integers(packed(), 128), compressed(4, False)),
    "compressed-tensors symmetric": (integers(packed(4, True), 64, symmetric=True), compressed(4, True)),
    "compressed-tensors 8 bit, act-order": (
        integers(packed(8, True), 32, True, bits=8, symmetric=True),
        compressed(8, True),
    ),
    "fp8 blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
}


def expected_logits(model: q.Model) -> q.Array:
    made = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in q.CONFIG.items() if k != "torch_dtype"})).eval()
    made.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in model.dense.items()})
    with torch.no_grad():
        return np.asarray(made.float()(torch.from_numpy(IDS.astype(np.int64))[None]).logits[0].numpy())


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    quantise, quantization = CASES[name]
    model = q.llama(quantise)
    wanted = expected_logits(model)
    checkpoint = open_checkpoint(model.write(tmp_path, quantization))
    exact = "fp8" not in name
    assert relative_rms(Reference(checkpoint).logits(IDS), wanted) < (1e-5 if exact else 5e-3)
    infos = {name: checkpoint.info(name) for name in checkpoint.names()}
    plan = native_plan(checkpoint.spec, infos, LIMITS)
    executor = TurbomindExecutor(NativeConfig(LIMITS, 16), checkpoint.spec, checkpoint)
    assert executor._model is not None
    assert executor._model.weight_bytes_used == plan.weights
    assert executor._model.workspace_bytes == plan.workspace
    tolerance = TOLERANCE if exact else 5e-3
    assert relative_rms(sequence_logits(executor, IDS), wanted) < tolerance
    assert relative_rms(sequence_logits(executor, IDS[:20], chunk=1), wanted[:20]) < tolerance


@pytest.mark.parametrize("name", CASES)
def test_packing_from_the_file_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    quantise, quantization = CASES[name]
    fast, slow, forms = both_images(q.llama(quantise).write(tmp_path, quantization))
    assert np.array_equal(fast, slow)
    by_python = (
        "act-order",
        "fp8",
        "zero points",
        "gptq 8 bit",
    )
    assert len(forms) >= 15 or any(word in name for word in by_python)


def test_a_quantised_head_in_its_own_order(tmp_path: Path) -> None:
    model = q.llama(integers(gptq(), 64, True, least_zero=1))
    parts, dense = integers(gptq(), 64, True, least_zero=1)("lm_head", q.VOCAB, q.HIDDEN, 900)
    del model.stored["lm_head.weight"]
    model.stored |= {f"lm_head.{part}": value for part, value in parts.items()}
    model.dense["lm_head.weight"] = dense
    checkpoint = open_checkpoint(model.write(tmp_path, config("gptq", group_size=64, desc_act=True)))
    executor = TurbomindExecutor(NativeConfig(LIMITS, 16), checkpoint.spec, checkpoint)
    infos = {name: checkpoint.info(name) for name in checkpoint.names()}
    assert executor._model is not None
    assert executor._model.weight_bytes_used == native_plan(checkpoint.spec, infos, LIMITS).weights
    assert relative_rms(sequence_logits(executor, IDS), expected_logits(model)) < TOLERANCE


@pytest.mark.parametrize(
    "name", ["awq 64", "gptq act-order", "compressed-tensors", "compressed-tensors W8A8", "fp8 blocks"]
)
def test_the_torch_engine_holds_the_same_weights(name: str, tmp_path: Path) -> None:
    quantise, quantization = CASES[name]
    model = q.llama(quantise)
    checkpoint = open_checkpoint(model.write(tmp_path, quantization))
    tensors = {name: checkpoint.read(name) for name in checkpoint.names()}
    logits = sequence_logits(make_torch(checkpoint.spec, tensors), IDS)
    assert relative_rms(logits, expected_logits(model)) < (5e-3 if "fp8" in name else 1e-4)


def test_orders_that_differ_under_one_input_are_refused(tmp_path: Path) -> None:
    def quantise(name: str, n: int, k: int, seed: int) -> tuple[q.Parts, q.Array]:
        matrix = q.random_matrix(n, k, 64, seed=seed, least_zero=1)
        g_idx = q.act_order(k, 64, seed)
        return q.pack_gptq(g_idx=g_idx)(*matrix), q.weights(*matrix, g_idx)

    path = q.llama(quantise).write(tmp_path, config("gptq", group_size=64, desc_act=True))
    checkpoint = open_checkpoint(path)
    words = rf"{path}: tensor 'model\.layers\.0\.self_attn\.q_proj\.weight' lists its inputs in another order"
    with pytest.raises(ModelError, match=words):
        TurbomindExecutor(NativeConfig(LIMITS, 16), checkpoint.spec, checkpoint)


@pytest.mark.parametrize("form", ["gptq", "compressed-tensors"])
def test_orders_that_differ_take_the_other_engine(form: str, tmp_path: Path) -> None:
    """Known before any weight is read; its logits are right."""

    def quantise(name: str, n: int, k: int, seed: int) -> tuple[q.Parts, q.Array]:
        matrix = q.random_matrix(n, k, 64, seed=seed, least_zero=1)
        g_idx = q.act_order(k, 64, seed)
        pack = q.pack_gptq if form == "gptq" else q.pack_compressed
        return pack(g_idx=g_idx)(*matrix), q.weights(*matrix, g_idx)

    said = compressed(4, False) if form != "gptq" else config(form, group_size=64, desc_act=True)
    path = str(q.llama(quantise).write(tmp_path, said))
    chosen = resolve(path, EngineConfig(session_len=64))
    assert chosen.backend == "pytorch"
    words = r"'model\.layers\.0\.self_attn\.q_proj\.weight' and .*k_proj\.weight' list the same inputs"
    assert re.search(words, chosen.engine)
    with pytest.raises(ModelError, match=rf"{path}: tensors {words}.*--backend pytorch"):
        resolve(path, TurbomindEngineConfig(session_len=64))


def test_scales_beyond_float16_are_named(tmp_path: Path) -> None:
    def quantise(name: str, n: int, k: int, seed: int) -> tuple[q.Parts, q.Array]:
        codes, zeros, scales = q.random_matrix(n, k, 64, seed=seed)
        wide = scales.astype(np.float32) * np.float32(1e9 if name.endswith("0.mlp.down_proj") else 1)
        return q.pack_awq(codes, zeros, wide), q.weights(codes, zeros, wide)

    path = q.llama(quantise).write(tmp_path, config("awq", group_size=64, version="gemm"))
    checkpoint = open_checkpoint(path)
    words = r"tensor 'model\.layers\.0\.mlp\.down_proj\.weight' has scales .* too large for float16"
    with pytest.raises(ModelError, match=rf"{path}: {words}"):
        TurbomindExecutor(NativeConfig(LIMITS, 16), checkpoint.spec, checkpoint)


def test_an_order_beside_none_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    quantise = but(integers(gptq(), 64, True, least_zero=1), "k_proj")
    path = q.llama(quantise).write(tmp_path, config("gptq", group_size=64, desc_act=True))
    checkpoint = open_checkpoint(path)
    infos = {name: checkpoint.info(name) for name in checkpoint.names()}
    with pytest.raises(ModelError, match=r"q_proj\.weight' lists its inputs.*k_proj\.weight' does not"):
        native_plan(checkpoint.spec, infos, LIMITS)
