"""Every format that is written, run by both engines: logits of transformers with the values meant.

The model has the demo model's shapes: 576 inputs in groups of 128 leave a last group of 64. The values are
computed here from codes, zero points and scales, not by reading the files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

from lmdeploy.models.formats.writers import WRITERS
from lmdeploy.models.registry import open_checkpoint
from lmdeploy.quant.scheme import WHOLE_ROW, WeightScheme
from lmdeploy.quant.tensors import GroupedTensor
from lmdeploy.turbomind.executor import NativeConfig, TurbomindExecutor
from lmdeploy.turbomind.plan import Limits, native_plan

IDS = np.random.default_rng(3).integers(0, q.VOCAB, 40).astype(np.int32)
LIMITS = Limits(max_rows=4, max_step_tokens=64, max_context=128, block_size=16, num_threads=2)
HIDDEN, FFN = 576, 1536
SHAPE = {
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (192, HIDDEN),
    "self_attn.v_proj": (192, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (FFN, HIDDEN),
    "mlp.up_proj": (FFN, HIDDEN),
    "mlp.down_proj": (HIDDEN, FFN),
}
Schemes = Mapping[str, WeightScheme | None]  # by the end of a module's name, "": every other one

FOUR, EIGHT = WeightScheme(4, 128), WeightScheme(8, 128)
CENTRED, CENTRED8 = WeightScheme(4, 128, True), WeightScheme(8, 128, True)
CHANNELS = WeightScheme(8, WHOLE_ROW, True)
MIXED = {
    "": FOUR,
    "v_proj": EIGHT,
    "down_proj": CENTRED8,
    "1.mlp.up_proj": None,
    "k_proj": WeightScheme(4, 64),
}
CASES: dict[str, tuple[str, Schemes]] = {
    "awq": ("awq", {"": FOUR}),
    "awq symmetric, some kept": ("awq", {"": CENTRED, "0.mlp.down_proj": None}),
    "gptq": ("gptq", {"": CENTRED}),
    "gptq 8 bits, one group": ("gptq", {"": CHANNELS}),
    "gptq_v2": ("gptq_v2", {"": FOUR}),
    "gptq_v2 mixed": ("gptq_v2", MIXED),
    "compressed-tensors": ("compressed-tensors", {"": FOUR}),
    "compressed-tensors symmetric": ("compressed-tensors", {"": CENTRED}),
    "compressed-tensors 8 bits": ("compressed-tensors", {"": EIGHT}),
    "compressed-tensors mixed": ("compressed-tensors", MIXED),
    "embedding and head in 8 bits": (
        "compressed-tensors",
        {"": CENTRED, "embed_tokens": CENTRED8, "lm_head": CENTRED8},
    ),
    "embedding like the layers": ("compressed-tensors", {"": CENTRED8, "embed_tokens": CENTRED8}),
    "w8a8": ("w8a8", {"": CHANNELS, "1.self_attn.o_proj": None}),
}


def random_tensor(scheme: WeightScheme, n: int, k: int, seed: int) -> tuple[GroupedTensor, q.Array]:
    """A tensor and its values."""
    rng, middle = np.random.default_rng(seed), 1 << scheme.bits - 1
    group = k if scheme.group_size == WHOLE_ROW else scheme.group_size
    codes = rng.integers(1, 2 * middle, (n, k)).astype(np.uint8)
    grid = n, scheme.groups(k)
    zeros = np.full(grid, middle, np.uint8)
    if not scheme.symmetric:
        zeros = rng.integers(0, 2 * middle, grid).astype(np.uint8)
    scales = (rng.uniform(0.5, 1.0, grid) * 2 / middle * k**-0.5).astype(np.float16)
    group_of = np.arange(k) // group
    steps = codes.astype(np.float32) - zeros.astype(np.float32)[:, group_of]
    values = steps * scales.astype(np.float32)[:, group_of]
    if scheme.bits == 8 and scheme.symmetric:
        return GroupedTensor(8, group, (codes ^ 0x80).view(np.int8), scales), values
    return GroupedTensor(scheme.bits, group, codes, scales, zeros), values


def written(name: str, schemes: Schemes, tied: bool = False) -> tuple[q.Model, dict[str, Any]]:
    """A model whose matrices a writer encoded, and its quantization_config."""
    writer, found = WRITERS[name], dict[str, WeightScheme | None]()

    def quantise(module: str, n: int, k: int, seed: int) -> tuple[q.Parts, q.Array] | None:
        end = max((end for end in schemes if module.endswith(end)), key=len)
        scheme = found[module] = schemes[end]
        if scheme is None:
            return None
        assert writer.refusal(scheme, (n, k)) is None
        tensor, values = random_tensor(scheme, n, k, seed)
        return writer.encode(tensor, scheme.symmetric, np.dtype(np.float16)), values

    model = q.llama(quantise, hidden=HIDDEN, linears=LINEARS)
    for seed, module in enumerate(("model.embed_tokens", "lm_head")):
        if module.rpartition(".")[2] in schemes:
            parts, values = quantise(module, q.VOCAB, HIDDEN, 900 + seed) or ({}, None)
            del model.stored[f"{module}.weight"]
            model.stored |= {f"{module}.{part}": value for part, value in parts.items()}
            model.dense[f"{module}.weight"] = values
    if tied:
        del model.stored["lm_head.weight"]
        model.dense["lm_head.weight"] = model.dense["model.embed_tokens.weight"]
    return model, writer.config(found)


def expected_logits(model: q.Model) -> q.Array:
    described = {k: v for k, v in {**q.CONFIG, **SHAPE}.items() if k != "torch_dtype"}
    made = LlamaForCausalLM(LlamaConfig(**described)).eval()
    made.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in model.dense.items()})
    with torch.no_grad():
        return np.asarray(made.float()(torch.from_numpy(IDS.astype(np.int64))[None]).logits[0].numpy())


def check_both_engines(path: Path, wanted: q.Array) -> None:
    checkpoint = open_checkpoint(path)
    infos = {name: checkpoint.info(name) for name in checkpoint.names()}
    executor = TurbomindExecutor(NativeConfig(LIMITS, 16), checkpoint.spec, checkpoint)
    assert executor._model is not None
    assert executor._model.weight_bytes_used == native_plan(checkpoint.spec, infos, LIMITS).weights
    assert relative_rms(sequence_logits(executor, IDS), wanted) < 2e-3
    tensors = {name: checkpoint.read(name) for name in checkpoint.names()}
    assert relative_rms(sequence_logits(make_torch(checkpoint.spec, tensors), IDS), wanted) < 1e-4
    fast, slow, _ = both_images(path)
    assert np.array_equal(fast, slow)


@pytest.mark.parametrize("name", CASES)
def test_both_engines_compute_what_was_meant(name: str, tmp_path: Path) -> None:
    model, quantization = written(*CASES[name])
    check_both_engines(model.write(tmp_path, quantization, **SHAPE), expected_logits(model))


def test_a_tied_embedding_in_8_bits_is_also_the_output_matrix(tmp_path: Path) -> None:
    schemes = {"": CENTRED, "embed_tokens": CENTRED8}
    model, quantization = written("compressed-tensors", schemes, tied=True)
    path = model.write(tmp_path, quantization, **SHAPE, tie_word_embeddings=True)
    check_both_engines(path, expected_logits(model))


def bytes_of_lmdeploy(
    pack: Callable[..., q.Parts],
) -> Callable[[str, int, int, int], tuple[q.Parts, q.Array]]:
    """Matrices by the names that LMDeploy's own W8A8 files have."""

    def quantise(module: str, n: int, k: int, seed: int) -> tuple[q.Parts, q.Array]:
        codes, zeros, scales = q.random_matrix(n, k, k, 8, True, seed)
        scales = scales.astype(np.float32)
        parts = pack(codes, zeros, scales)
        return {"weight": parts["weight"], "scale": parts["weight_scale"]}, q.weights(codes, zeros, scales)

    return quantise


def test_lmdeploys_own_w8a8_files_are_read(tmp_path: Path) -> None:
    model = q.llama(bytes_of_lmdeploy(q.store_bytes()), hidden=HIDDEN, linears=LINEARS)
    described = {"quant_method": "smooth_quant", "quant_dtype": "int8"}
    check_both_engines(model.write(tmp_path, described, **SHAPE), expected_logits(model))
