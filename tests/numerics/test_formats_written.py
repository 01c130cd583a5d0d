"""Every format that is written, run by both engines: logits of transformers with the values meant.

The model has the demo model's shapes: 576 inputs in groups of 128 leave a last group of 64. The values are
computed from codes, zero points and scales, not by reading the files.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import quantised_hf as q
from executors import make_torch
from lite_cases import logits, quantise
from native_case import relative_rms, sequence_logits
from packing import both_images
from tiny_model import write_tiny_model
from written_models import (
    CENTRED,
    CENTRED8,
    CHANNELS,
    DEMO,
    EIGHT,
    FOUR,
    IDS,
    MIXED,
    Schemes,
    expected_logits,
    written,
)

from lmdeploy.models.registry import open_checkpoint
from lmdeploy.turbomind.executor import NativeConfig, TurbomindExecutor
from lmdeploy.turbomind.plan import Limits, native_plan

LIMITS = Limits(max_rows=4, max_step_tokens=64, max_context=128, block_size=16, num_threads=2)
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
    model, quantization = written(*CASES[name], DEMO)
    check_both_engines(model.write(tmp_path, quantization, **DEMO.config), expected_logits(model, DEMO))


def test_a_tied_embedding_in_8_bits_is_also_the_output_matrix(tmp_path: Path) -> None:
    schemes = {"": CENTRED, "embed_tokens": CENTRED8}
    model, quantization = written("compressed-tensors", schemes, DEMO, tied=True)
    path = model.write(tmp_path, quantization, **DEMO.config, tie_word_embeddings=True)
    check_both_engines(path, expected_logits(model, DEMO))


def test_groups_in_an_order_of_their_own(tmp_path: Path) -> None:
    """As `lite auto_gptq --act-order` writes them; what the files mean is told by the reference."""
    model = write_tiny_model(tmp_path / "model")
    flags = ["--act-order", "--w-group-size", "32", "--dtype", "float16"]
    assert quantise("auto_gptq", model, tmp_path / "w", *flags) == 0
    check_both_engines(tmp_path / "w", logits(tmp_path / "w", list(IDS)))


def bytes_of_lmdeploy(module: str, n: int, k: int, seed: int) -> tuple[q.Parts, q.Array]:
    """A matrix by the names that LMDeploy's own W8A8 files have."""
    codes, zeros, scales = q.random_matrix(n, k, k, 8, True, seed)
    scales = scales.astype(np.float32)
    parts = q.store_bytes()(codes, zeros, scales)
    return {"weight": parts["weight"], "scale": parts["weight_scale"]}, q.weights(codes, zeros, scales)


def test_lmdeploys_own_w8a8_files_are_read(tmp_path: Path) -> None:
    model = q.llama(bytes_of_lmdeploy, hidden=DEMO.hidden, linears=DEMO.linears)
    described = {"quant_method": "smooth_quant", "quant_dtype": "int8"}
    check_both_engines(model.write(tmp_path, described, **DEMO.config), expected_logits(model, DEMO))
