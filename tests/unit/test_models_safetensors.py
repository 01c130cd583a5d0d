"""Hugging Face directories: every file form of the weights; what is wrong with them is one clear line."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hf_files import HIDDEN, hf_tensors, write_hf

from lmdeploy.errors import ModelError
from lmdeploy.models.registry import load_spec, open_checkpoint


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shards", [0, 1, 3])
def test_values_come_as_they_are_stored(dtype: Any, shards: int, tmp_path: Path) -> None:
    weights = hf_tensors(dtype)
    checkpoint = open_checkpoint(write_hf(tmp_path, weights, shards))
    assert len(checkpoint.names()) == len(weights)
    pairs = {
        "embed.weight": "model.embed_tokens.weight",
        "lm_head.weight": "lm_head.weight",
        "layers.1.attn.k_proj.weight": "model.layers.1.self_attn.k_proj.weight",
        "layers.0.ffn_norm.weight": "model.layers.0.post_attention_layernorm.weight",
        "layers.0.ffn.down_proj.weight": "model.layers.0.mlp.down_proj.weight",
    }
    for ours, theirs in pairs.items():
        read, info = checkpoint.read(ours), checkpoint.info(ours)
        assert read.dtype == dtype
        assert read.tobytes() == weights[theirs].tobytes()
        assert (info.shape, info.file_bytes, info.group_size) == (read.shape, read.nbytes, 0)
        assert (info.kind, info.bits) == (np.dtype(dtype).name, 8 * np.dtype(dtype).itemsize)
    checkpoint.close()


@pytest.mark.parametrize("form", ["absent", "redundant"])
def test_tied_embeddings_in_every_file_form(form: str, tmp_path: Path) -> None:
    """One weight, whether or not the file repeats it."""
    weights = hf_tensors(tied=True)
    if form == "redundant":
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    checkpoint = open_checkpoint(write_hf(tmp_path, weights, tie_word_embeddings=True))
    assert checkpoint.spec.tie_embeddings
    assert "lm_head.weight" not in checkpoint.names()


def test_old_rotary_buffers_are_no_weights(tmp_path: Path) -> None:
    weights = hf_tensors()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    open_checkpoint(write_hf(tmp_path, weights))


def test_both_dtype_spellings_and_missing_ones_are_read(tmp_path: Path) -> None:
    for number, dtype in enumerate([{"torch_dtype": "bfloat16"}, {"torch_dtype": None, "dtype": "float16"}]):
        assert load_spec(write_hf(tmp_path / str(number), **dtype)).hidden_size == HIDDEN


def without(name: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        weights = hf_tensors()
        del weights[name]
        write_hf(path, weights)

    return damage


def with_tensor(name: str, value: np.ndarray) -> Callable[[Path], None]:
    return lambda path: write_hf(path, {**hf_tensors(), name: value}) and None


def cut_off(path: Path) -> None:
    file = write_hf(path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def huge_header(path: Path) -> None:
    file = write_hf(path) / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 1 << 60) + file.read_bytes()[8:])


def empty(path: Path) -> None:
    (write_hf(path) / "model.safetensors").write_bytes(b"")


def lost_shard(path: Path) -> None:
    (write_hf(path, shards=3) / "model-00002-of-00003.safetensors").unlink()


def lost_index(path: Path) -> None:
    (write_hf(path, shards=3) / "model.safetensors.index.json").unlink()


def wrong_index(path: Path) -> None:
    index = write_hf(path, shards=3) / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    table["weight_map"]["model.norm.weight"] = "model-00001-of-00003.safetensors"
    table["weight_map"]["lm_head.weight"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(table))


def outside_index(path: Path) -> None:
    index = write_hf(path, shards=1) / "model.safetensors.index.json"
    table = {"weight_map": {"model.norm.weight": "../../etc/passwd"}}
    index.write_text(json.dumps(table))


def no_weights(path: Path) -> None:
    (write_hf(path) / "model.safetensors").unlink()


def pickled_weights(path: Path) -> None:
    no_weights(path)
    (path / "pytorch_model.bin").write_bytes(b"x")


def bad_json(path: Path) -> None:
    (write_hf(path) / "config.json").write_text('{"architectures": [')


def list_json(path: Path) -> None:
    (write_hf(path) / "config.json").write_text("[]")


def no_config(path: Path) -> None:
    (write_hf(path) / "config.json").unlink()


def instead_of(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    """A file of the model replaced by something that is none."""

    def damage(path: Path) -> None:
        write_hf(path)
        (path / name).unlink()
        make(path / name)

    return damage


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


NAN = np.full((HIDDEN,), np.nan, np.float32)


def read_all(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    for name in checkpoint.names():
        checkpoint.read(name)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut_off, "not a sound safetensors file"),
        (huge_header, "not a sound safetensors file"),
        (empty, "not a sound safetensors file"),
        (lost_shard, "model-00002-of-00003.safetensors: a weight file"),
        (lost_index, "holds 3 safetensors files but no model.safetensors.index.json"),
        (wrong_index, "is missing, although"),
        (outside_index, "is no file name"),
        (no_weights, "holds config.json but no safetensors weights"),
        (pickled_weights, "pytorch_model.bin is of a kind that is not read"),
        (bad_json, "config.json: not valid JSON"),
        (list_json, "config.json: a JSON object is expected, not list"),
        (instead_of("model.safetensors", Path.mkdir), "model.safetensors: is a directory"),
        (instead_of("model.safetensors", dangling), "model.safetensors: is a link to nothing"),
        (instead_of("model.safetensors", os.mkfifo), "model.safetensors: is no regular file"),
        (instead_of("config.json", dangling), "config.json: is a link to nothing"),
        (no_config, "holds neither config.json nor a .gguf file"),
        (without("lm_head.weight"), "tensor 'lm_head.weight' is missing"),
        (
            without("model.layers.1.mlp.up_proj.weight"),
            "tensor 'model.layers.1.mlp.up_proj.weight' is missing",
        ),
        (
            with_tensor("model.layers.2.mlp.up_proj.weight", np.ones((2, 2), np.float32)),
            "has no place in a llama",
        ),
        (
            with_tensor("model.layers.0.self_attn.q_proj.bias", np.ones(32, np.float32)),
            "has no place in a llama",
        ),
        (with_tensor("model.norm.weight", np.ones(25, np.float32)), "has shape [25]; [24] is expected"),
        (with_tensor("model.norm.weight", np.ones(24, np.int32)), "is of kind I32, which is not supported"),
        (
            with_tensor("model.norm.weight", NAN),
            "tensor 'model.norm.weight' holds values that are not finite",
        ),
    ],
)
def test_damage_is_one_clear_line(damage: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    damage(tmp_path)
    with pytest.raises(ModelError) as caught:
        read_all(tmp_path)
    message = str(caught.value)
    assert words in message
    assert str(tmp_path) in message
    assert "\n" not in message


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_values_that_are_not_finite_are_found_anywhere(dtype: Any, value: float, tmp_path: Path) -> None:
    weights = hf_tensors(dtype)
    weights["model.layers.1.mlp.down_proj.weight"][-1, -1] = value
    checkpoint = open_checkpoint(write_hf(tmp_path, weights))
    checkpoint.read("layers.0.ffn.down_proj.weight")
    with pytest.raises(ModelError, match="not finite"):
        checkpoint.read("layers.1.ffn.down_proj.weight")
