"""Unquantised weights: what each type and each accuracy costs, against float32 on the values in the files."""

from __future__ import annotations

import logging
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from executors import make_torch
from native_case import make_executor, relative_rms, sequence_logits, with_tensor
from native_llama import Case, llama

from lmdeploy.errors import ModelError

IDS = np.random.default_rng(3).integers(0, 130, 90).astype(np.int32)


def halves() -> Case:
    """float16 matrices with values that bfloat16 does not have."""
    model, spec, tensors = llama()
    rng = np.random.default_rng(0)

    def finer(t: Any) -> npt.NDArray[np.float16]:
        return (np.asarray(t) * rng.uniform(0.9, 1.1, t.shape)).astype(np.float16)

    return model, spec, {n: finer(t) if t.ndim == 2 else np.asarray(t) for n, t in tensors.items()}


@pytest.fixture(scope="module")
def case() -> Case:
    return halves()


@pytest.fixture(scope="module")
def wanted(case: Case) -> npt.NDArray[np.float32]:
    return sequence_logits(make_torch(case[1], case[2]), IDS)


def error(case: Case, wanted: npt.NDArray[np.float32], **options: Any) -> float:
    return relative_rms(sequence_logits(make_executor(case[1], case[2], **options), IDS), wanted)


def test_float16_is_held_as_it_is(case: Case, wanted: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lmdeploy"):
        assert error(case, wanted) < 3e-4
        assert error(case, wanted, accuracy="fast") < 3e-4  # its activations are float32 in any case
    assert caplog.messages == []


def test_float16_in_bfloat16_is_rounded_and_said(
    case: Case, wanted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "lmdeploy"):
        assert 1e-3 < error(case, wanted, dtype="bfloat16") < 1e-2
    assert ["rounded to 16 bits" in m for m in caplog.messages] == [True]


def test_one_plane_rounds_what_two_keep() -> None:
    case = llama()
    wanted = sequence_logits(make_torch(case[1], case[2]), IDS)
    exact, auto, fast = (error(case, wanted, accuracy=x) for x in ("exact", "auto", "fast"))
    assert exact < 3e-4
    assert auto == fast and 1e-3 < fast < 2e-2


def test_bfloat16_in_float16_keeps_what_fits() -> None:
    _, spec, tensors = llama()
    stored = {n: np.asarray(t).astype(ml_dtypes.bfloat16) for n, t in tensors.items()}
    wanted = sequence_logits(make_torch(spec, tensors), IDS)
    got = sequence_logits(make_executor(spec, stored, dtype="float16"), IDS)
    assert relative_rms(got, wanted) < 3e-4


def test_values_beyond_float16_are_refused_by_name() -> None:
    _, spec, tensors = llama()
    large = np.array(tensors["lm_head.weight"])
    large[3, 5] = 70_000
    with pytest.raises(ModelError, match=r"'lm_head\.weight' .* 65504, .* dtype bfloat16"):
        make_executor(spec, with_tensor(tensors, "lm_head.weight", large), dtype="float16")
