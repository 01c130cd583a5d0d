"""Memory of a walk over a model: that of a layer, however many there are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from tiny_model import write_tiny_model

from lmdeploy.lite.shards import Entry, write_shard

HIDDEN, FFN, VOCAB = 512, 1408, 258
LAYER_BYTES = 4 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN)  # in float32
PEAK = """
import resource, sys
from lmdeploy.cli.main import main
code = main(sys.argv[1:])
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
sys.exit(code)
"""


def write_model(folder: Path, layers: int) -> Path:
    write_tiny_model(folder)
    config = json.loads((folder / "config.json").read_text())
    sizes = {"hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": layers, "head_dim": 128}
    (folder / "config.json").write_text(json.dumps({**config, **sizes, "num_key_value_heads": 4}))
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (VOCAB, HIDDEN)),
        "model.norm.weight": (HIDDEN,),
    }
    for i in range(layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{i}.{name}.weight"] = (HIDDEN,)
        for name in "qkvo":
            shapes[f"model.layers.{i}.self_attn.{name}_proj.weight"] = (HIDDEN, HIDDEN)
        for name, shape in (("gate", (FFN, HIDDEN)), ("up", (FFN, HIDDEN)), ("down", (HIDDEN, FFN))):
            shapes[f"model.layers.{i}.mlp.{name}_proj.weight"] = shape
    values = {n: rng.standard_normal(s, dtype=np.float32) * np.float32(0.04) for n, s in shapes.items()}
    write_shard(folder / "model.safetensors", {n: Entry(v, v.dtype) for n, v in values.items()})
    return folder


def peak(model: Path, folder: Path, samples: int) -> int:
    """Bytes in memory at most, of a process that gathers statistics."""
    flags = ["--work-dir", str(folder), "--calib-samples", str(samples), "--calib-seqlen", "256"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", PEAK, "lite", "calibrate", str(model), *flags],
        capture_output=True,
        text=True,
        check=True,
        env={**environment, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
    )
    return int(done.stdout.rpartition("peak ")[2])


def test_more_layers_take_no_more_memory(tmp_path: Path) -> None:
    few = peak(write_model(tmp_path / "two", 2), tmp_path / "a", 8)
    many = peak(write_model(tmp_path / "ten", 10), tmp_path / "b", 8)
    assert many - few < 2 * LAYER_BYTES
