"""Packing from the bytes of a file gives, bit for bit, what packing the values read by Python gives.

Quantised Hugging Face directories are in test_formats_hf.py, beside their logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import quantised_hf as q
from demo_model import demo_gguf
from format_files import write_gguf
from gguf import GGMLQuantizationType as Kind
from packing import both_images, image

from lmdeploy.errors import ModelError
from lmdeploy.models.registry import open_checkpoint

GGUF_KINDS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
FLOATS: dict[str, Any] = {"float16": np.float16, "float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


@pytest.mark.parametrize("name", GGUF_KINDS)
def test_gguf(name: str, tmp_path: Path) -> None:
    # Neighbours with 16 and 32 inputs a group, so that the packed groups are finer than the file's.
    kinds = {"attn_v": Kind.Q6_K} if name in ("Q5_0", "Q8_0") else {}
    fast, slow, forms = both_images(write_gguf(tmp_path / "model.gguf", kinds, Kind[name]))
    assert np.array_equal(fast, slow) and name in forms and len(forms) == 8


def test_the_demo_file() -> None:
    fast, slow, _ = both_images(demo_gguf())
    assert np.array_equal(fast, slow)


def floats(kind: str, path: Path) -> Path:
    """Values of many sizes that do not all fit a bfloat16, on odd numbers of channels."""
    model, rng = q.llama(lambda *_: None, vocab=99), np.random.default_rng(3)
    for name, value in model.stored.items():
        sizes = rng.choice([1e-7, 1e-4, 1.0, 100.0], value.shape)
        model.stored[name] = (rng.standard_normal(value.shape) * sizes).astype(FLOATS[kind])
    return model.write(path, None, vocab_size=99)


@pytest.mark.parametrize("kind", FLOATS)
def test_floats(kind: str, tmp_path: Path) -> None:
    fast, slow, forms = both_images(floats(kind, tmp_path))
    assert np.array_equal(fast, slow) and set(forms) == {kind} and len(forms) == 16


@pytest.mark.parametrize("threads", [1, 3, 7])
def test_any_number_of_threads(threads: int, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", {}, Kind.Q4_K)
    assert np.array_equal(image(open_checkpoint(path), threads), image(open_checkpoint(path), 2))


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("at", [0, 255, -1])
def test_what_is_no_number_is_found(kind: str, value: float, at: int, tmp_path: Path) -> None:
    model = q.llama(lambda *_: None)
    for name in model.stored:
        model.stored[name] = model.stored[name].astype(FLOATS[kind])
    model.stored["model.layers.1.mlp.up_proj.weight"].reshape(-1)[at] = value
    with pytest.raises(
        ModelError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' holds values that are not"
    ):
        image(open_checkpoint(model.write(tmp_path, None)))


@pytest.mark.parametrize("name", GGUF_KINDS)
def test_an_infinite_scale_is_found(name: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", {}, Kind[name])
    checkpoint = open_checkpoint(path)
    stored = checkpoint.stored_matrix("layers.0.attn.o_proj.weight")
    assert stored is not None
    data = bytearray(path.read_bytes())
    block_bytes = {"Q6_K": 210, "Q4_K": 144, "Q5_K": 176}.get(name, 0)
    row = bytes(np.asarray(stored.data[-1]))
    at = data.rindex(row) + (208 if block_bytes == 210 else 0)
    data[at : at + 2] = b"\x00\x7c"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"attn_output\.weight' holds values that are not"):
        image(open_checkpoint(path))


def test_halves_round_as_ieee_754_says(tmp_path: Path) -> None:
    """Scales of K kinds are products: all factors, so that subnormal and tied ones are among them."""
    path = write_gguf(tmp_path / "model.gguf", {}, Kind.Q6_K)
    checkpoint = open_checkpoint(path)
    stored = checkpoint.stored_matrix("layers.0.ffn.gate_proj.weight")
    assert stored is not None
    data, rng = bytearray(path.read_bytes()), np.random.default_rng(5)
    begin = data.index(bytes(np.asarray(stored.data[0])))
    for block in range(512):
        at = begin + 210 * block + 208
        data[at : at + 2] = int(rng.integers(0, 0x7000)).to_bytes(2, "little")
        data[at - 16 : at] = bytes(rng.integers(-3, 4, 16).astype(np.int8).tobytes())
    path.write_bytes(data)
    fast, slow, _ = both_images(path)
    assert np.array_equal(fast, slow)
