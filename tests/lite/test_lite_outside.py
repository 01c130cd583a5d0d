"""Embedding and output matrix in 8 bits: which they are, how far from the originals, where refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import quantised_hf as q

from lmdeploy.errors import ConfigError
from lmdeploy.lite.outside import SCHEME, outside_result, outside_schemes
from lmdeploy.models.formats.writers import WRITERS
from lmdeploy.models.registry import open_checkpoint
from lmdeploy.quant.tensors import GroupedTensor

PACKED = WRITERS["compressed-tensors"]


@pytest.mark.parametrize("tied", [False, True])
def test_both_are_within_half_a_step(tied: bool, tmp_path: Path) -> None:
    model = q.llama(lambda *_: None, vocab=2100)  # more than are rounded at once
    if tied:
        del model.stored["lm_head.weight"]
    path = model.write(tmp_path, None, vocab_size=2100, tie_word_embeddings=tied)
    checkpoint = open_checkpoint(path)
    schemes = outside_schemes(checkpoint.spec, PACKED)
    assert list(schemes) == (["embed"] if tied else ["embed", "lm_head"])
    result = outside_result(checkpoint, schemes)
    assert [report.bits_per_weight for report in result.linears] == [8.125] * len(schemes)
    for name in schemes:
        tensor, original = result.tensors[f"{name}.weight"], checkpoint.read(f"{name}.weight")
        assert isinstance(tensor, GroupedTensor) and isinstance(original, np.ndarray)
        steps = np.repeat(tensor.scales.astype(np.float32), SCHEME.group_size, axis=1)
        # Scales are rounded to float16: 127 steps may miss the largest value by 127 x 2^-11 of a step.
        assert (np.abs(tensor.dequantize() - original) <= 0.57 * steps).all()
    assert all(report.error < 1e-4 for report in result.linears)


def test_formats_that_hold_neither_are_refused(tmp_path: Path) -> None:
    spec = open_checkpoint(q.llama(lambda *_: None).write(tmp_path, None)).spec
    for name in ("awq", "gptq", "gptq_v2", "w8a8"):
        with pytest.raises(ConfigError, match=rf"format {name} holds no embedding.*compressed-tensors"):
            outside_schemes(spec, WRITERS[name])
