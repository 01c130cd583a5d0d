"""GGUF kinds end to end: the native engine on the file against the reference on the same (exact) values.

The reference holds what gguf-py dequantises, bit for bit (tests/unit/test_models_formats_gguf.py). The native
engine keeps the codes and rounds scales of K kinds to float16, at most 2^-11 of each: within the tolerance of
its activations.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from format_files import VOCAB, write_gguf
from gguf import GGMLQuantizationType as Kind
from native_case import relative_rms, sequence_logits

from lmdeploy.models.reference import Reference
from lmdeploy.models.registry import open_checkpoint
from lmdeploy.turbomind.executor import NativeConfig, TurbomindExecutor
from lmdeploy.turbomind.plan import Limits, native_plan

TOLERANCE = 3e-3
IDS = np.random.default_rng(3).integers(0, VOCAB, 60).astype(np.int32)
LIMITS = Limits(max_rows=4, max_step_tokens=64, max_context=128, block_size=16, num_threads=2)
K_M = {"attn_v": Kind.Q6_K, "ffn_down": Kind.Q6_K, "token_embd": Kind.Q6_K}
CASES: dict[str, tuple[dict[str, Kind], Kind]] = {
    **{kind.name: ({}, kind) for kind in (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0)},
    **{kind.name: ({}, kind) for kind in (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)},
    "Q4_K_M": (K_M, Kind.Q4_K),
    "Q5_K_M": (K_M, Kind.Q5_K),
    "gate and up differ": ({"ffn_gate": Kind.Q5_K, "ffn_up": Kind.Q6_K}, Kind.Q5_1),
}


@pytest.mark.parametrize("name", CASES)
def test_native_equals_reference(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", *CASES[name]))
    wanted = Reference(checkpoint).logits(IDS)
    infos = {name: checkpoint.info(name) for name in checkpoint.names()}
    plan = native_plan(checkpoint.spec, infos, LIMITS)
    executor = TurbomindExecutor(NativeConfig(LIMITS, 16), checkpoint.spec, checkpoint)
    assert executor._model.weight_bytes_used == plan.weights
    assert relative_rms(sequence_logits(executor, IDS), wanted) < TOLERANCE
    assert relative_rms(sequence_logits(executor, IDS[:20], chunk=1), wanted[:20]) < TOLERANCE
    assert wanted.std() > 0.05
