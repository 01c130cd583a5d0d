"""The reference on GGUF files against transformers with the weights that gguf-py dequantises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from demo_model import demo_gguf, reference_model
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from gguf_files import write_llama
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lmdeploy.errors import ModelError
from lmdeploy.models.reference import Reference
from lmdeploy.models.registry import load_spec, open_checkpoint
from lmdeploy.models.rope import inverse_frequencies
from lmdeploy.text.tokenizer import load_tokenizer


def test_demo_logits_equal_transformers() -> None:
    """Both in float32 on equal weights; only the order of sums differs."""
    ids = load_tokenizer(demo_gguf()).encode("The capital of France is Paris. The capital of Italy is")
    ours = Reference(open_checkpoint(demo_gguf())).logits(ids)
    with torch.no_grad():
        expected = reference_model()(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=2e-3)
    assert np.array_equal(ours.argmax(-1), expected.argmax(-1))
    assert load_tokenizer(demo_gguf()).decode([int(ours[-1].argmax())]) == " Rome"


def llama3_divisors(factor: float) -> np.ndarray[Any, Any]:
    """What Llama 3.1 scaling divides frequencies by, from transformers (float32 [8] for heads of 16)."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=rope)
    scaled = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0].numpy()
    plain = 500000.0 ** -(np.arange(0, 16, 2) / 16)
    return (plain / scaled).astype(np.float32)


def write_with_frequencies(path: Path, divisors: np.ndarray[Any, Any]) -> Path:
    """A tiny model with the tensor that converters write for Llama 3.1."""
    source = gguf.GGUFReader(write_llama(path.with_suffix(".plain"), Kind.F32))
    writer = gguf.GGUFWriter(str(path), "llama")
    for name, field in source.fields.items():
        if name.startswith("llama."):
            writer.add_key_value(name, field.contents(), field.types[0])
    writer.add_float32("llama.rope.freq_base", 500000.0)
    for tensor in source.tensors:
        writer.add_tensor(tensor.name, dequantize(tensor.data, tensor.tensor_type))
    writer.add_tensor("rope_freqs.weight", divisors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_frequencies_are_recognised(factor: float, tmp_path: Path) -> None:
    divisors = llama3_divisors(factor)
    path = write_with_frequencies(tmp_path / "m.gguf", divisors)
    rope = load_spec(path).layers[0].attention.rope
    assert rope is not None
    assert (rope.kind, rope.original_max_position) == ("llama3", 8192)
    assert rope.factor == pytest.approx(factor, rel=1e-6)
    plain = 500000.0 ** -(np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(inverse_frequencies(rope), plain / divisors, rtol=1e-5)
    assert "rope_freqs.weight" not in open_checkpoint(path).names()


def test_other_frequencies_are_refused(tmp_path: Path) -> None:
    divisors = llama3_divisors(8.0)
    divisors[3] *= 1.5
    with pytest.raises(ModelError, match="holds frequencies other than those"):
        load_spec(write_with_frequencies(tmp_path / "m.gguf", divisors))
