"""The GGUF reader against gguf-py, on the demo model and on synthetic files, sound and damaged."""

from __future__ import annotations

import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from demo_model import demo_gguf
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader
from gguf.quants import dequantize
from gguf_files import write_llama
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmdeploy.errors import ModelError
from lmdeploy.models.gguf import GGUFFile
from lmdeploy.models.registry import load_spec, open_checkpoint
from lmdeploy.quant.tensors import GroupedTensor


@pytest.fixture(scope="module")
def reader() -> GGUFReader:
    return GGUFReader(demo_gguf())


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_llama(tmp_path_factory.mktemp("gguf") / "small.gguf").read_bytes()


def values(tensor: Any) -> np.ndarray:
    return tensor.dequantize() if isinstance(tensor, GroupedTensor) else np.asarray(tensor)


def test_demo_tensors_equal_the_oracle_bit_for_bit(reader: GGUFReader) -> None:
    file = GGUFFile(demo_gguf())
    assert len(reader.tensors) == 272
    for expected in reader.tensors:
        oracle = dequantize(expected.data, expected.tensor_type)
        ours = values(file.read(expected.name))
        assert ours.dtype == np.float32
        assert np.array_equal(ours.view(np.uint32), oracle.view(np.uint32)), expected.name


def test_demo_metadata_is_read_fast_and_whole(reader: GGUFReader) -> None:
    start = time.process_time()
    file = GGUFFile(demo_gguf())
    assert time.process_time() - start < 0.2
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            assert file.metadata[key] == field.contents()


def test_demo_query_rows_are_brought_to_half_order(reader: GGUFReader) -> None:
    """The permutation of llama.cpp's converter, applied to what we serve, gives the file's rows."""
    checkpoint = open_checkpoint(demo_gguf())
    stored = {t.name: t for t in reader.tensors}
    for part, heads in (("q", 9), ("k", 3)):
        tensor = stored[f"blk.4.attn_{part}.weight"]
        ours = values(checkpoint.read(f"layers.4.attn.{part}_proj.weight"))
        back = ours.reshape(heads, 2, 32, 576).swapaxes(1, 2).reshape(-1, 576)
        assert np.array_equal(back, dequantize(tensor.data, tensor.tensor_type))


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
def test_every_kind_equals_the_oracle(kind: Kind, tmp_path: Path) -> None:
    path = write_llama(tmp_path / "a.gguf", kind)
    file = GGUFFile(path)
    for expected in GGUFReader(path).tensors:
        read = file.read(expected.name)
        oracle = dequantize(expected.data, expected.tensor_type)
        assert np.array_equal(values(read).astype(np.float32), oracle)
    embedding = file.read("token_embd.weight")
    dtypes = {Kind.F32: np.float32, Kind.F16: np.float16, Kind.BF16: ml_dtypes.bfloat16}
    assert isinstance(embedding, GroupedTensor) if kind not in dtypes else embedding.dtype == dtypes[kind]


def test_info_needs_no_data_and_agrees_with_it() -> None:
    checkpoint = open_checkpoint(demo_gguf())
    total = 0
    for name in checkpoint.names():
        info, tensor = checkpoint.info(name), checkpoint.read(name)
        assert info.shape == tensor.shape
        assert info.group_size == (tensor.group_size if isinstance(tensor, GroupedTensor) else 0)
        assert info.bits == (tensor.bits if isinstance(tensor, GroupedTensor) else 32)
        total += info.file_bytes
    assert total == sum(int(t.n_bytes) for t in GGUFReader(demo_gguf()).tensors)


def patched(data: bytes, at: int, form: str, value: int) -> bytes:
    out = bytearray(data)
    struct.pack_into(form, out, at, value)
    return bytes(out)


def kind_offset(data: bytes, name: bytes) -> int:
    """Where the tensor table holds the kind of a matrix."""
    return data.index(name) + len(name) + 4 + 2 * 8


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: d[:10], "shorter than its header"),
        (lambda d: b"GGML" + d[4:], "not a GGUF file"),
        (lambda d: patched(d, 4, "<I", 1), "version 1 is not supported"),
        (lambda d: patched(d, 4, ">I", 3), "big-endian"),
        (lambda d: patched(d, 8, "<Q", 1 << 60), "bytes of header can hold"),
        (lambda d: patched(d, 16, "<Q", 1 << 63), "bytes of header can hold"),
        (lambda d: patched(d, 24, "<Q", 1 << 40), "bytes of a metadata key"),
        (lambda d: d[: len(d) // 2], "cut off or damaged"),
        (lambda d: d[:-1], "cut off or damaged"),
        (lambda d: d[:200], "damaged GGUF file"),
        (
            lambda d: patched(d, kind_offset(d, b"token_embd.weight"), "<I", 10),
            "of kind Q2_K, which is not supported",
        ),
        (lambda d: patched(d, kind_offset(d, b"token_embd.weight"), "<I", 777), "of kind number 777"),
        (lambda d: patched(d, kind_offset(d, b"token_embd.weight") + 4, "<Q", 1 << 50), "cut off or damaged"),
        (
            lambda d: patched(d, kind_offset(d, b"blk.1.attn_q.weight") + 4, "<Q", 33),
            "'blk.1.attn_q.weight' begins at byte 33 of the data, which is no multiple of the alignment, 32",
        ),
        (
            lambda d: patched(d, kind_offset(d, b"blk.1.attn_q.weight") + 4, "<Q", 32),
            "tensors 'token_embd.weight' and 'blk.1.attn_q.weight' overlap",
        ),
        (lambda d: d.replace(b"blk.0.attn_q.weight", b"blk.0.attn_\xff.weight"), "is not UTF-8"),
        (lambda d: d.replace(b"blk.0.attn_v.weight", b"blk.0.attn_k.weight"), "occurs twice"),
    ],
)
def test_damage_is_one_clear_line(damage: Any, words: str, small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(damage(small))
    with pytest.raises(ModelError) as caught:
        GGUFFile(path)
    message = str(caught.value)
    assert words in message
    assert str(path) in message
    assert "\n" not in message


def test_unsupported_kind_lists_the_supported_ones(small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "k.gguf"
    path.write_bytes(patched(small, kind_offset(small, b"token_embd.weight"), "<I", 20))
    supported = "BF16, F16, F32, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0"
    with pytest.raises(ModelError, match=f"IQ4_NL, which is not supported .supported: {supported}"):
        load_spec(path)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_gives_anything_but_a_model_error(
    data: st.DataObject, small: bytes, tmp_path: Path
) -> None:
    """Truncations and changed bytes, mostly in the header: ModelError, or a sound read of bounded size."""
    broken = bytearray(small)
    header = small.index(b"blk.1.ffn_norm.weight") + 60
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.one_of(st.integers(0, header), st.integers(0, len(small) - 1)))
        broken[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del broken[data.draw(st.integers(0, len(broken))) :]
    path = tmp_path / "fuzz.gguf"
    path.write_bytes(broken)
    tracemalloc.start()
    try:
        message = read_all(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "\n" not in message
    assert peak < 20 * len(small)


def read_all(path: Path) -> str:
    """Reads the whole model; the message of a ModelError, or nothing."""
    try:
        checkpoint = open_checkpoint(path)
    except ModelError as error:
        return str(error)
    for name in sorted(checkpoint.names()):
        try:
            assert values(checkpoint.read(name)).shape == checkpoint.info(name).shape
        except ModelError as error:
            return str(error)
    return ""
