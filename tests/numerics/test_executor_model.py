"""Each executor against transformers in float32 on the same (bfloat16-rounded or dequantised) weights.

Tolerance: native activations keep 14 bits a group (int8 planes) or 16 bits (bfloat16 planes), its keys and
values fp16 (relative error 5e-4): a relative RMS of 2e-3 in the logits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from executors import EXECUTORS, make_executor
from native_case import NewTokens, make_batch, relative_rms, samples, sequence_logits
from native_llama import WHOLE_GROUPS, Case, expected_logits, gemma2, llama, quantized, qwen3

from lmdeploy.models.spec import RopeSpec

TOLERANCE = 2e-3
IDS = np.random.default_rng(3).integers(0, 130, 150).astype(np.int32)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
CASES: dict[str, Callable[[], Case]] = {
    "grouped queries": llama,
    "as many key heads": lambda: llama(num_key_value_heads=6),
    "tied": lambda: llama(tie_word_embeddings=True),
    "biases": lambda: llama(attention_bias=True, mlp_bias=True),
    "llama3 rope": lambda: llama(RopeSpec(1e4, 16, "llama3", 8.0, 1.0, 4.0, 32), rope_parameters=LLAMA3),
    "linear rope": lambda: llama(
        RopeSpec(1e4, 16, "linear", 4.0),
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    ),
    "gelu": lambda: llama(hidden_act="gelu"),
    "query and key norms": qwen3,
    "windows, soft caps, post norms": gemma2,
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", EXECUTORS)
def test_prefill_and_decode_equal_transformers(kind: str, name: str) -> None:
    model, spec, tensors = CASES[name]()
    wanted = expected_logits(model, IDS)
    executor = make_executor(kind, spec, tensors)
    assert relative_rms(sequence_logits(executor, IDS), wanted) < TOLERANCE
    assert relative_rms(sequence_logits(executor, IDS[:40], chunk=1), wanted[:40]) < TOLERANCE


QUANTIZED: dict[str, Callable[[str], tuple[str, int] | None]] = {
    "int4 with minimum": lambda name: ("int4_min", 32) if name.endswith("proj.weight") else None,
    "int4 with zero": lambda name: ("int4_zero", 32) if name.endswith("proj.weight") else None,
    "int8 everywhere": lambda name: ("int8", 32) if "norm" not in name else None,
    "kinds and groups mixed": lambda name: {
        "q_proj": ("int4_min", 32),
        "k_proj": ("int8", 96),  # one scale a row
        "v_proj": None,
        "gate_proj": ("int4_zero", 32),
        "up_proj": ("int8", 32),
        "down_proj": ("int8", 160),
        "embed": ("int8", 32),
    }.get(name.split(".")[-2]),
}


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("kind", EXECUTORS)
def test_quantised_equal_transformers_on_dequantised(kind: str, name: str) -> None:
    model, spec, tensors = quantized(llama(**WHOLE_GROUPS), QUANTIZED[name])
    wanted = expected_logits(model, IDS)
    executor = make_executor(kind, spec, tensors)
    assert relative_rms(sequence_logits(executor, IDS), wanted) < TOLERANCE
    assert relative_rms(sequence_logits(executor, IDS[:40], chunk=1), wanted[:40]) < TOLERANCE


@pytest.mark.parametrize("kind", EXECUTORS)
def test_long_context_in_many_ranges(kind: str) -> None:
    """1,100 tokens are three ranges of attention; decoding one row spreads them over threads."""
    model, spec, tensors = llama(num_key_value_heads=1)
    ids = np.random.default_rng(4).integers(0, 130, 1100).astype(np.int32)
    wanted = expected_logits(model, ids)
    executor = make_executor(kind, spec, tensors)
    blocks = np.arange(70, dtype=np.int32)
    first = sequence_logits(executor, ids[:500], blocks)
    second = executor.execute(make_batch([NewTokens(ids[500:1099], 500, blocks)], samples([598])))
    last = executor.execute(make_batch([NewTokens(ids[1099:], 1099, blocks)], samples([0], want_logits=True)))
    assert second.finite.all()
    assert relative_rms(first, wanted[:500]) < TOLERANCE
    assert relative_rms(last.logits[0], wanted[1099]) < TOLERANCE


@pytest.mark.parametrize("kind", EXECUTORS)
def test_only_asked_positions_are_returned(kind: str) -> None:
    _, spec, tensors = llama()
    executor = make_executor(kind, spec, tensors)
    every = sequence_logits(executor, IDS[:20])
    columns = samples([3, 19], want_logits=[False, True])
    result = executor.execute(make_batch([NewTokens(IDS[:20], 0, np.arange(2, dtype=np.int32))], columns))
    assert result.token_ids.tolist() == every[[3, 19]].argmax(1).tolist()
    assert list(result.logits) == [1]
    assert result.logits[1].tobytes() == every[19].tobytes()
