"""Memory that quantising takes at the shape of a 7B model, layer by layer, to the end.

    python benchmarks/lite/memory_7b.py --folder /tmp/7b
    python benchmarks/lite/memory_7b.py --folder /tmp/7b --layers 4 --samples 128

Writes a model of Llama 2 7B's shape with random weights, one file for each layer, has `lmdeploy lite
auto_awq` quantise it with its default method, and prints the most memory that the process held while each
layer was computed (the kernel's own count, reset when a layer is finished). Layers are alike, so few of them
show what all take. Hidden states lie in files: memory does not depend on the number of samples, time and disk
do. Everything written is removed in the end.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import numpy as np
from measure.arguments import described, positive
from tiny_model import write_tiny_model

from lite.sizes import SHAPE
from lmdeploy.lite.shards import FLOATS, Entry, write_shard

_PAUSE = 0.2  # seconds between looks
_NAMES = {
    "attn.q_proj": "self_attn.q_proj", "attn.k_proj": "self_attn.k_proj", "attn.v_proj": "self_attn.v_proj",
    "attn.o_proj": "self_attn.o_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "ffn.gate_proj": "mlp.gate_proj", "ffn.up_proj": "mlp.up_proj", "ffn.down_proj": "mlp.down_proj",
}  # fmt: skip


def write_model(folder: Path, layers: int) -> Path:
    """Float16 weights; the tokenizer has one token for each byte."""
    write_tiny_model(folder)
    (folder / "model.safetensors").unlink()
    attention, ffn = SHAPE.layers[0].attention, SHAPE.layers[0].ffn
    config = json.loads((folder / "config.json").read_text()) | {
        "hidden_size": SHAPE.hidden_size,
        "intermediate_size": ffn.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "vocab_size": SHAPE.vocab_size,
        "max_position_embeddings": SHAPE.max_position,
        "dtype": "float16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    place = {}
    for number, tensors in enumerate(_files(layers)):
        rng = np.random.default_rng(number)
        name = f"model-{number + 1:05d}-of-{layers + 1:05d}.safetensors"
        write_shard(folder / name, {stored: _random(rng, shape) for stored, shape in tensors.items()})
        place.update(dict.fromkeys(tensors, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))
    return folder


def _files(layers: int) -> Iterator[dict[str, tuple[int, ...]]]:
    """Names and shapes of the tensors of each file."""
    ends = {"model.embed_tokens.weight": "embed.weight", "lm_head.weight": "lm_head.weight"}
    shapes = dict(SHAPE.tensors())
    yield {"model.norm.weight": shapes["norm.weight"]} | {name: shapes[our] for name, our in ends.items()}
    for layer in range(layers):
        yield {
            f"model.layers.{layer}.{stored}.weight": shapes[f"layers.0.{our}.weight"]
            for our, stored in _NAMES.items()
        }


def _random(rng: np.random.Generator, shape: tuple[int, ...]) -> Entry:
    if len(shape) == 1:
        return Entry(np.ones(shape, np.float16), FLOATS["float16"])
    values = np.empty(shape, np.float16)
    for row in values:
        row[:] = rng.standard_normal(shape[1], np.float32) * np.float32(shape[1] ** -0.5)
    return Entry(values, FLOATS["float16"])


def peaks(command: list[str], work: Path) -> Iterator[tuple[str, int, float]]:
    """(what was done, bytes held at most meanwhile, seconds); RuntimeError with the last lines of a failure.

    work: where the command keeps a file for each finished layer.
    """
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        finished, most, begin = 0, 0, time.monotonic()
        while process.poll() is None:
            with suppress(OSError, StopIteration):
                most = max(most, _peak(process.pid))
            if len(list(work.glob("layer-*.json"))) > finished:
                yield f"layer {finished}", most, time.monotonic() - begin
                Path(f"/proc/{process.pid}/clear_refs").write_text("5")
                finished, most, begin = finished + 1, 0, time.monotonic()
            time.sleep(_PAUSE)
        if process.returncode:
            output.seek(0)
            raise RuntimeError("".join(output.readlines()[-5:]))
        yield "the rest, and the export", most, time.monotonic() - begin


def _peak(process: int) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def parse() -> Namespace:
    parser = described(__doc__)
    parser.add_argument("--folder", type=Path, help="for the model and its result; default: a temporary one")
    parser.add_argument("--layers", type=positive, default=3)
    parser.add_argument("--samples", type=positive, default=4, help="of calibration")
    parser.add_argument("--length", type=positive, default=2048, help="tokens of a sample")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        model = write_model(Path(name) / "model", args.layers)
        result = Path(name) / "result"
        flags = ["--calib-samples", str(args.samples), "--calib-seqlen", str(args.length), "--no-report"]
        code = "import sys; from lmdeploy.cli.main import main; sys.exit(main(sys.argv[1:]))"
        command = [sys.executable, "-c", code, "lite", "auto_awq", str(model), "--work-dir", str(result)]
        print(
            f"{args.layers} layers of Llama 2 7B's shape, {args.samples} x {args.length} tokens", flush=True
        )
        most = 0
        for what, held, seconds in peaks([*command, *flags], Path(f"{result}.partial") / "work"):
            print(f"{what}: {held / 1e9:.2f} GB at most, {seconds / 60:.1f} min", flush=True)
            most = max(most, held)
        print(f"most memory held: {most / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
