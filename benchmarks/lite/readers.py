"""Whether other packages read our files: each dequantises a model in each of its formats, and must agree.

    python benchmarks/lite/readers.py --rivals DIR/rivals.toml

The model is small and random, with the demo model's vocabulary; groups divide every size. A matrix agrees
when no value differs from ours by more than one rounding to float16. Exit status 1 when one does not agree.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import numpy as np
from demo_directory import demo_directory
from measure.arguments import described
from safetensors.numpy import load_file, save_file

from lite.bench_lite import read_rivals
from lite.make import WORKERS, last_line, version_of
from lite.spawn import spawn
from lmdeploy.lite.job import Calibration, Output, quantise_model
from lmdeploy.lite.recipe import Recipe
from lmdeploy.models.registry import open_checkpoint
from lmdeploy.quant.scheme import WeightScheme
from lmdeploy.quant.tensors import GroupedTensor

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
LAYERS, HEAD_DIM = 2, 64
EVEN, UNEVEN, BYTES = WeightScheme(4, 128, True), WeightScheme(4, 128, False), WeightScheme(8, -1, True)


@dataclass(frozen=True, slots=True)
class Trial:
    package: str
    form: str
    scheme: WeightScheme


TRIALS = (
    Trial("autoawq", "awq", UNEVEN),
    Trial("gptqmodel", "awq", UNEVEN),
    Trial("gptqmodel", "gptq", EVEN),
    Trial("gptqmodel", "gptq_v2", UNEVEN),
    Trial("llmcompressor", "compressed-tensors", EVEN),
    Trial("llmcompressor", "compressed-tensors", UNEVEN),
    Trial("llmcompressor", "w8a8", BYTES),
)


def small_model(folder: Path) -> Path:
    """Random weights under the names of a Llama."""
    if folder.exists():
        return folder
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(demo_directory(), partial, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((partial / "config.json").read_text())
    config.update(SIZES, num_hidden_layers=LAYERS, head_dim=HEAD_DIM)
    (partial / "config.json").write_text(json.dumps(config))
    random, hidden, inner = np.random.default_rng(0), SIZES["hidden_size"], SIZES["intermediate_size"]
    tensors = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    keys = SIZES["num_key_value_heads"] * HEAD_DIM
    for i in range(LAYERS):
        parts = {"q": (hidden, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, hidden)}
        for part, shape in parts.items():
            tensors[f"model.layers.{i}.self_attn.{part}_proj.weight"] = shape
        for part, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            tensors[f"model.layers.{i}.mlp.{part}_proj.weight"] = shape
        for part in ("input", "post_attention"):
            tensors[f"model.layers.{i}.{part}_layernorm.weight"] = (hidden,)
    values = {
        name: (random.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float16)
        for name, shape in tensors.items()
    }
    save_file(values, partial / "model.safetensors", {"format": "pt"})
    partial.replace(folder)
    return folder


def written(model: Path, trial: Trial, out: Path) -> Path:
    kind = "even" if trial.scheme.symmetric else "zero points"
    folder = out / f"{trial.form}, {trial.scheme.bits} bits, {kind}"
    if not folder.exists():
        recipe = Recipe(method="rtn", scheme=trial.scheme, clip=False)
        quantise_model(model, recipe, Calibration(), Output(folder, trial.form), lambda *_: None)
    return folder


def differences(folder: Path, theirs: dict[str, Any]) -> float:
    """Largest difference of a value, in units of its rounding to float16. ValueError for a matrix missing."""
    checkpoint, worst = open_checkpoint(folder), 0.0
    for i in range(len(checkpoint.spec.layers)):
        for linear in checkpoint.spec.linears(i):
            tensor = checkpoint.read(f"{linear.name}.weight")
            ours = tensor.dequantize() if isinstance(tensor, GroupedTensor) else tensor.astype(np.float32)
            name = checkpoint.stored_name(f"{linear.name}.weight").rsplit(".", 1)[0]
            if name not in theirs or theirs[name].shape != ours.shape:
                raise ValueError(f"{name} is missing or of another shape in what was read")
            step = np.maximum(np.abs(ours), 2.0**-14) * 2.0**-11
            worst = max(worst, float((np.abs(ours - theirs[name]) / step).max()))
    checkpoint.close()
    return worst


def tried(trial: Trial, folder: Path, python: str, out: Path) -> tuple[str, bool]:
    """What is to be said of one reader and one file, and whether it is in order."""
    values = out / f"{trial.package} {folder.name}.safetensors"
    job = values.with_suffix(".json")
    job.write_text(json.dumps({"method": "read", "model": str(folder), "out": str(values)}))
    log = values.with_suffix(".txt")
    ended = spawn([python, str(WORKERS / f"{trial.package}_worker.py"), str(job)], log, 1200)
    if ended.status != 0:
        return f"{trial.package} | refused: {last_line(log.read_text())}", False
    worst = differences(folder, load_file(values))
    values.unlink()
    agreed = worst <= 1.0
    said = "equal" if agreed else f"differs by {worst:.3g} roundings to float16"
    return f"{version_of(ended.output)} | {said}", agreed


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--rivals", type=Path, required=True, help="TOML file that says where they are")
    parser.add_argument("--out", type=Path, default=Path("build/bench-lite/readers"))
    parser.add_argument("--only", nargs="+", metavar="PACKAGE", help="those alone")
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    rivals, model, wrong = read_rivals(args.rivals), small_model(out / "model"), 0
    print("| our file | read by | |\n|---|---|---|")
    for trial in TRIALS:
        if args.only and trial.package not in args.only:
            continue
        place = rivals.get(trial.package, {"error": "not installed"})
        folder = written(model, trial, out)
        if "python" in place:
            said, agreed = tried(trial, folder, place["python"], out)
            wrong += not agreed
        else:
            said = f"{trial.package} | skipped: {place['error']}"
        print(f"| {folder.name} | {said} |", flush=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
