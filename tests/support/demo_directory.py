"""The demo model as a Hugging Face directory in float16, made once for each run of the tests.

The values are those of its GGUF file (a 4-bit grid), rounded to float16; no transformers needed.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import ml_dtypes  # noqa: F401  (first: it registers bfloat16 with NumPy)
import numpy as np
from demo_model import demo_gguf
from safetensors.numpy import save_file

from lmdeploy.models.registry import open_checkpoint
from lmdeploy.models.spec import ModelSpec
from lmdeploy.quant.tensors import GroupedTensor
from lmdeploy.text.chat_template import own_templates
from lmdeploy.text.sources import read_source, write_as_files

_PARTS = {
    "attn": "self_attn",
    "ffn": "mlp",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def demo_directory(directory: Path | None = None) -> Path:
    """A directory with config, weights, tokenizer, template and generation_config.

    Without `directory` it is one below the system's folder for temporary files, shared by all tests: treat it
    as read-only.
    """
    target = directory or Path(tempfile.gettempdir()) / f"lmdeploy-demo-float16-{os.getuid()}"
    if not target.is_dir():
        partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=target.name))
        write_demo_directory(partial)
        try:
            partial.rename(target)
        except OSError:  # another process was first
            shutil.rmtree(partial)
    return target


def write_demo_directory(directory: Path) -> None:
    checkpoint = open_checkpoint(demo_gguf())
    spec, tensors = checkpoint.spec, {}
    for name in checkpoint.names():
        value = checkpoint.read(name)
        dense = value.dequantize() if isinstance(value, GroupedTensor) else value
        tensors[_stored(name)] = np.ascontiguousarray(dense.astype(np.float16))
    checkpoint.close()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    write_as_files(read_source(demo_gguf()), own_templates(demo_gguf()), directory)
    (directory / "config.json").write_text(json.dumps(_config(spec)))
    (directory / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))


def _stored(name: str) -> str:
    if not name.startswith("layers."):
        return {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}[name]
    _, layer, part, rest = name.split(".", 3)
    return f"model.layers.{layer}.{_PARTS[part]}.{rest}"


def _config(spec: ModelSpec) -> dict[str, object]:
    layer = spec.layers[0]
    assert layer.attention.rope is not None
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float16",
        "hidden_size": spec.hidden_size,
        "intermediate_size": layer.ffn.intermediate_size,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": layer.attention.num_heads,
        "num_key_value_heads": layer.attention.num_kv_heads,
        "head_dim": layer.attention.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position,
        "rms_norm_eps": spec.norm.eps,
        "rope_theta": layer.attention.rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": spec.tie_embeddings,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
