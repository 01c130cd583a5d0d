"""What a quantised 7B takes on disk and in memory, from headers: at most 0.30 of 16-bit floats.

The files are real to every reader but hold no data: their headers, and as many bytes of nothing.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from lmdeploy.models.formats.writers import WRITERS
from lmdeploy.models.registry import open_checkpoint
from lmdeploy.quant.scheme import WeightScheme
from lmdeploy.turbomind.plan import Limits, native_plan

LIMITS = Limits(max_rows=1, max_step_tokens=64, max_context=2048, block_size=64, num_threads=2)
LLAMA2_7B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LARGE_VOCABULARY = {  # the sizes of Qwen2.5-7B
    **LLAMA2_7B,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
Config = Mapping[str, object]
Part = tuple[str, tuple[int, ...], int]  # safetensors type, shape, bytes of a value


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Of all weights by their names in 16-bit files."""
    sizes = ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers")
    h, f, vocab, layers = (int(str(config[key])) for key in sizes)
    kv = h * int(str(config["num_key_value_heads"])) // int(str(config["num_attention_heads"]))
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens": (vocab, h), "lm_head": (vocab, h)}
    found["model.norm"] = (h,)
    for i in range(layers):
        p = f"model.layers.{i}."
        found |= {p + "input_layernorm": (h,), p + "post_attention_layernorm": (h,)}
        found |= {f"{p}self_attn.{x}_proj": (h if x in "qo" else kv, h) for x in "qkvo"}
        found |= {p + "mlp.gate_proj": (f, h), p + "mlp.up_proj": (f, h), p + "mlp.down_proj": (h, f)}
    return found


def packed_parts(scheme: WeightScheme, n: int, k: int) -> dict[str, Part]:
    """By the public layout of pack-quantized."""
    groups = scheme.groups(k)
    parts = {
        "weight_packed": ("I32", (n, k * scheme.bits // 32), 4),
        "weight_scale": ("F16", (n, groups), 2),
        "weight_shape": ("I64", (2,), 8),
    }
    if not scheme.symmetric:
        parts["weight_zero_point"] = ("I32", (n * scheme.bits // 32, groups), 4)
    return parts


def write_headers(path: Path, config: Config, outside: WeightScheme | None) -> tuple[int, int]:
    """A directory of nothing but headers; bytes of its weights, and of the same in 16 bits."""
    tensors, schemes, sixteen = dict[str, Part](), dict[str, WeightScheme | None](), 0
    for module, shape in shapes(config).items():
        sixteen += 2 * int(np.prod(shape))
        if len(shape) == 1:
            tensors[f"{module}.weight"] = ("F16", shape, 2)
            continue
        scheme = schemes[module] = WeightScheme(4, 128) if "layers" in module else outside
        if scheme is None:
            tensors[f"{module}.weight"] = ("F16", shape, 2)
        else:
            n, k = shape
            tensors |= {f"{module}.{last}": part for last, part in packed_parts(scheme, n, k).items()}
    end, header = 0, {}
    for name, (kind, shape, width) in tensors.items():
        begin, end = end, end + width * int(np.prod(shape))
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    described = WRITERS["compressed-tensors"].config(schemes)
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": described}))
    return end, sixteen


@pytest.mark.parametrize(
    ("config", "outside", "limit"),
    [
        (LLAMA2_7B, None, 0.30),
        (LLAMA2_7B, WeightScheme(8, 128, True), 0.275),
        (LARGE_VOCABULARY, WeightScheme(8, 128, True), 0.30),
    ],
)
def test_a_7b_takes_at_most_so_much_of_16_bits(
    config: Config, outside: WeightScheme | None, limit: float, tmp_path: Path
) -> None:
    disk, sixteen = write_headers(tmp_path, config, outside)
    assert disk <= limit * sixteen
    checkpoint = open_checkpoint(tmp_path)
    infos = {name: checkpoint.info(name) for name in checkpoint.names()}
    memory = native_plan(checkpoint.spec, infos, LIMITS).weights
    assert memory <= limit * sixteen
    assert abs(memory - disk) < 0.02 * disk
    checkpoint.close()
