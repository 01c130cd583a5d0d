"""GGUF's quantised kinds against gguf-py on random blocks: bit for bit in float32."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from format_files import gguf_blocks, write_gguf
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from lmdeploy.errors import ModelError
from lmdeploy.models.formats import gguf_blocks as gguf_blocks_module
from lmdeploy.models.formats.gguf_blocks import LAYOUTS, unpack
from lmdeploy.models.gguf import GGUFFile
from lmdeploy.models.registry import open_checkpoint
from lmdeploy.quant.tensors import GroupedTensor

QUANTISED = [Kind(number) for number, layout in LAYOUTS.items() if layout.unpack]


def test_the_table_agrees_with_the_public_sizes() -> None:
    assert {kind.name for kind in QUANTISED} == {
        *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"),
    }
    for number, layout in LAYOUTS.items():
        assert layout.name == Kind(number).name
        assert (layout.block, layout.block_bytes) == gguf.GGML_QUANT_SIZES[Kind(number)]


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(rows=st.integers(1, 5), blocks=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_values_equal_the_oracle_bit_for_bit(kind: Kind, rows: int, blocks: int, seed: int) -> None:
    layout = LAYOUTS[kind]
    raw = gguf_blocks(kind, rows, blocks * layout.block, seed)
    with pytest.MonkeyPatch.context() as patch:  # two rows at a time
        patch.setattr(gguf_blocks_module, "_VALUES_AT_ONCE", 2 * blocks * layout.block)
        tensor = unpack(layout, raw.reshape(rows, blocks, layout.block_bytes))
    oracle = dequantize(raw, kind)
    assert tensor.shape == oracle.shape == (rows, blocks * layout.block)
    assert (tensor.bits, tensor.group_size) == (layout.bits, layout.group)
    # Adding zero makes both zeros positive: products with a zero code may differ in its sign.
    assert np.array_equal((tensor.dequantize() + 0).view(np.uint32), (oracle + 0).view(np.uint32))


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_every_code_is_reached(kind: Kind) -> None:
    """The random blocks of these tests use all codes, so that no bit goes unseen."""
    layout = LAYOUTS[kind]
    tensor = unpack(layout, gguf_blocks(kind, 8, 1024).reshape(8, -1, layout.block_bytes))
    bits = int(kind.name[1])
    assert len(np.unique(tensor.codes)) == 1 << bits
    assert tensor.codes.min() == (-(1 << bits - 1) if layout.kind == "int8" else 0)


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_a_file_of_each_kind(kind: Kind, tmp_path: Path) -> None:
    """Matrices keep their codes, vectors become float32; both equal gguf-py's reading of the file."""
    writer = gguf.GGUFWriter(str(tmp_path / "a.gguf"), "llama")
    writer.add_tensor("matrix", gguf_blocks(kind, 5, 512), raw_dtype=kind)
    writer.add_tensor("vector", gguf_blocks(kind, 1, 256)[0], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "a.gguf")
    stored = {t.name: t for t in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    matrix, vector = file.read("matrix"), file.read("vector")
    assert isinstance(matrix, GroupedTensor)
    assert isinstance(vector, np.ndarray)
    assert np.array_equal(matrix.dequantize(), dequantize(stored["matrix"].data, kind))
    assert np.array_equal(vector, dequantize(stored["vector"].data, kind))
    assert file.tensors["matrix"].file_bytes == stored["matrix"].n_bytes


def test_rounded_scales_are_said(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "k.gguf", {"attn_v": Kind.Q6_K}, Kind.Q4_K)
    note = "the native engine rounds group scales of Q4_K, Q6_K to float16; codes are as in the file"
    assert open_checkpoint(path).notes == (note,)
    assert open_checkpoint(write_gguf(tmp_path / "5.gguf", {}, Kind.Q5_1)).notes == ()


def test_a_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m-00001-of-00003.gguf", {}, Kind.Q4_K, parts=3)
    with pytest.raises(ModelError, match="one part of a split GGUF model; join the parts"):
        open_checkpoint(path)
