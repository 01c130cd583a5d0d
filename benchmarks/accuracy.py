"""How far the engine's logits are from a float32 run of the same quantised weights: mean KL divergence.

    python benchmarks/accuracy.py                                     the demo model in each accuracy
    python benchmarks/accuracy.py --peers DIR/peers.toml              and beside llama.cpp's Q4_0

The text is the part of the Python manual that every Python carries (pydoc_data.topics), in windows of 512
tokens of which the second half counts, as llama-perplexity does it. The yardstick is llama.cpp computing a
Q4_0 file, against its own computation of the same weights kept in float32. Needs torch.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from bench_native import read_setup
from measure.arguments import described, model_path, positive
from measure.demo import demo_model
from measure.rows import ACCURACIES

from lmdeploy import TurbomindEngineConfig
from lmdeploy.engine.batch import Batch, SampleColumns
from lmdeploy.models.registry import open_checkpoint
from lmdeploy.runtime.build import build_engine
from lmdeploy.runtime.resolve import resolve
from lmdeploy.text.tokenizer import load_tokenizer

WINDOW = 512
TARGETS = {"fast": 2.0, "auto": 1.0, "exact": 0.05}  # multiples of the yardstick
F32 = npt.NDArray[np.float32]


def public_text() -> str:
    """English prose with some code, the same for one version of Python."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def windows(model: Path, count: int) -> list[npt.NDArray[np.int32]]:
    ids = load_tokenizer(model).encode(public_text())
    return [np.array(ids[i * WINDOW : (i + 1) * WINDOW], np.int32) for i in range(count)]


def scored() -> range:
    """Positions of a window that are predicted from at least half of it, as llama-perplexity counts."""
    return range(WINDOW // 2, WINDOW - 1)


def log_softmax(logits: F32) -> npt.NDArray[np.float64]:
    x = logits.astype(np.float64)
    x -= x.max(1, keepdims=True)
    return x - np.log(np.exp(x).sum(1, keepdims=True))


def divergences(reference: F32, logits: F32) -> npt.NDArray[np.float64]:
    """KL(reference || logits) of each row, in nats."""
    wanted, got = log_softmax(reference), log_softmax(logits)
    return (np.exp(wanted) * (wanted - got)).sum(1)


@dataclass
class Tally:
    """What was seen of one way to compute."""

    kl: list[float] = field(default_factory=list)
    same_top: int = 0

    def add(self, reference: F32, logits: F32) -> None:
        for begin in range(0, len(logits), 64):  # float64 of all rows at once would take too much
            part = slice(begin, begin + 64)
            self.kl += divergences(reference[part], logits[part]).tolist()
            self.same_top += int((reference[part].argmax(1) == logits[part].argmax(1)).sum())

    def summary(self) -> dict[str, float]:
        kl = np.array(self.kl)
        mean, error = kl.mean(), kl.std() / np.sqrt(len(kl))
        return {
            "mean": float(mean),
            "error": float(error),
            "p99": float(np.quantile(kl, 0.99)),
            "same_top": self.same_top / len(kl),
        }


def window_batch(ids: npt.NDArray[np.int32], block_size: int) -> Batch:
    """One sequence from its first token, the raw logits of the scored positions wanted."""
    index = np.array(scored(), np.int32)
    n = len(index)
    zeros, ones = np.zeros(n, np.float32), np.ones(n, np.float32)
    none = np.zeros(n + 1, np.int32)
    samples = SampleColumns(
        token_index=index,
        target_ids=np.full(n, -1, np.int32),
        temperature=zeros,
        top_k=np.zeros(n, np.int32),
        top_p=ones,
        min_p=zeros,
        repetition_penalty=ones,
        presence_penalty=zeros,
        frequency_penalty=zeros,
        seed=np.zeros(n, np.uint64),
        position=np.zeros(n, np.int64),
        logprobs=np.full(n, -1, np.int32),
        bias_start=none,
        bias_ids=np.zeros(0, np.int32),
        bias_values=np.zeros(0, np.float32),
        history_start=none,
        history_ids=np.zeros(0, np.int32),
        history_counts=np.zeros(0, np.int32),
        want_logits=np.ones(n, np.bool_),
    )
    blocks = -(-len(ids) // block_size)
    ends = np.array([0, len(ids)], np.int32), np.array([0, blocks], np.int32)
    context = np.zeros(1, np.int32)
    return Batch(ids, ends[0], context, ends[1], np.arange(blocks, dtype=np.int32), samples)


def executor_of(model: Path, options: dict[str, Any]) -> Any:
    config = TurbomindEngineConfig(
        session_len=2 * WINDOW,
        max_batch_size=1,
        max_prefill_token_num=WINDOW,
        cache_max_entry_count=0.01,
        **options,
    )
    return build_engine(resolve(str(model), config)).executor


def logits_of(executor: Any, ids: npt.NDArray[np.int32]) -> F32:
    result = executor.execute(window_batch(ids, executor.capabilities().block_size))
    return np.stack([result.logits[i] for i in range(len(scored()))])


def ours(model: Path, variants: dict[str, dict[str, Any]], count: int) -> dict[str, dict[str, float]]:
    """Summaries by name of variant; `variants` gives the options of each."""
    from lmdeploy.models.reference import Reference

    checkpoint = open_checkpoint(model)
    reference = Reference(checkpoint)
    checkpoint.close()
    executors = {name: executor_of(model, options) for name, options in variants.items()}
    tallies = {name: Tally() for name in variants}
    rows = slice(scored().start, scored().stop)
    for ids in windows(model, count):
        wanted = reference.logits(ids)[rows]
        for name, executor in executors.items():
            tallies[name].add(wanted, logits_of(executor, ids))
    return {name: tally.summary() for name, tally in tallies.items()}


def yardstick(tools: Path, file: Path, count: int, threads: int) -> dict[str, float]:
    """llama.cpp's computation of a quantised file against its own of the same weights in float32."""
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        text, wide, base = folder / "text", folder / "f32.gguf", folder / "base.kld"
        text.write_text(public_text())
        run(tools / "llama-quantize", "--allow-requantize", file, wide, "F32")
        same = ["-f", text, "-c", WINDOW, "--chunks", count, "-t", threads, "--kl-divergence-base", base]
        run(tools / "llama-perplexity", "-m", wide, *same, "-ctk", "f32", "-ctv", "f32")
        said = run(tools / "llama-perplexity", "-m", file, *same, "--kl-divergence")
    return {name: _statistic(said, pattern) for name, pattern in _STATISTICS.items()}


_STATISTICS = {
    "mean": r"Mean\s+KLD:\s*(\S+)",
    "error": r"Mean\s+KLD:\s*\S+\s*±\s*(\S+)",
    "p99": r"99\.0%\s+KLD:\s*(\S+)",
    "same_top": r"Same top p:\s*(\S+)",
}


def _statistic(text: str, pattern: str) -> float:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"llama-perplexity did not print {pattern!r}")
    return float(found[1]) / (100 if "top" in pattern else 1)


def run(*command: object) -> str:
    done = subprocess.run([str(x) for x in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{Path(str(command[0])).name} failed: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout + done.stderr


def table(found: dict[str, dict[str, float]], measure: dict[str, float] | None) -> Iterator[str]:
    yield "| computed by | mean KL, nats | 99 % | same first choice | of the yardstick | target | |"
    yield "|---|---|---|---|---|---|---|"
    for name, s in found.items():
        row = f"| {name} | {s['mean']:.3g} ± {s['error']:.1g} | {s['p99']:.3g} | {s['same_top']:.2%} |"
        bound = TARGETS.get(name.split()[0])
        if measure is None or bound is None:
            yield row + " | | |"
        else:
            share = s["mean"] / measure["mean"]
            yield row + f" {share:.3f} | <= {bound} | {'met' if share <= bound else 'missed'} |"


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--model", type=model_path, help="the demo model when left out")
    parser.add_argument("--windows", type=positive, default=17, help=f"of {WINDOW} tokens; 17 score 4,335")
    parser.add_argument("--accuracies", nargs="+", choices=ACCURACIES, default=list(ACCURACIES))
    parser.add_argument("--peers", type=Path, help="TOML file that says where llama.cpp and the models are")
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    variants = {name: {"accuracy": name, "num_threads": args.threads} for name in args.accuracies}
    found = ours(args.model or demo_model(), variants, args.windows)
    measure = None
    setup = read_setup(args.peers, None)
    if "llama.cpp" in setup.peers:
        file = next((setup.models / "135m-q4_0").glob("*.gguf"))
        measure = yardstick(Path(setup.peers["llama.cpp"]["bin"]), file, args.windows, args.threads)
        found["llama.cpp Q4_0 (yardstick)"] = measure
    print("\n".join(table(found, measure)))
    python = ".".join(str(x) for x in sys.version_info[:2])
    print(f"\n{args.windows * len(scored())} positions of pydoc_data.topics of Python {python}")
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
