"""The GGUF reader against gguf-py, on the demo model and on synthetic files, sound and damaged."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize

from lmdeploy.models.gguf import GGUFFile
from lmdeploy.models.registry import open_checkpoint
from lmdeploy.quant.tensors import GroupedTensor


@pytest.fixture(scope="module")
def reader(demo_model: Path) -> GGUFReader:
    return GGUFReader(demo_model)


def values(tensor: object) -> np.ndarray:
    return tensor.dequantize() if isinstance(tensor, GroupedTensor) else np.asarray(tensor)


def test_demo_tensors_equal_the_oracle_bit_for_bit(demo_model: Path, reader: GGUFReader) -> None:
    file = GGUFFile(demo_model)
    assert len(reader.tensors) == 272
    for expected in reader.tensors:
        oracle = dequantize(expected.data, expected.tensor_type)
        ours = values(file.read(expected.name))
        assert ours.dtype == np.float32
        assert np.array_equal(ours.view(np.uint32), oracle.view(np.uint32)), expected.name


def test_demo_metadata_is_read_fast(demo_model: Path) -> None:
    start = time.process_time()
    file = GGUFFile(demo_model)
    assert time.process_time() - start < 0.2
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152


def test_demo_query_rows_are_brought_to_half_order(demo_model: Path, reader: GGUFReader) -> None:
    """The permutation of llama.cpp's converter, undone: its own formula, written the other way round."""
    checkpoint = open_checkpoint(demo_model)
    stored = {t.name: t for t in reader.tensors}
    for part, heads in (("q", 9), ("k", 3)):
        tensor = stored[f"blk.4.attn_{part}.weight"]
        ours = values(checkpoint.read(f"layers.4.attn.{part}_proj.weight"))
        back = ours.reshape(heads, 2, 32, 576).swapaxes(1, 2).reshape(-1, 576)
        assert np.array_equal(back, dequantize(tensor.data, tensor.tensor_type))
