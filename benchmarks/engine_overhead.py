"""Time the engine spends on one decode step, apart from computing it.

Drives the real engine over an executor that answers at once with prepared arrays, and prints microseconds per
step (median) as a Markdown table: the whole `step()`, and its parts plan, pack and commit. With --model also
what share of real steps of that model lies outside the native engine's parallel region: scheduling, packing,
Python, the call itself and waking threads.

    python benchmarks/engine_overhead.py [--model PATH] [--json FILE]
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from measure.arguments import described, model_path, positive

from lmdeploy.engine.batch import Batch, StepResult
from lmdeploy.engine.executor import Capabilities
from lmdeploy.engine.loop import Engine, EngineOptions
from lmdeploy.engine.request import Request, SamplingParams

SHORT = 64  # tokens of a prompt where real steps are timed: the overhead hardly depends on them


class InstantExecutor:
    """Answers any batch with token 1 and keeps the time spent inside out of the account."""

    def __init__(self, block_size: int, num_blocks: int, max_rows: int) -> None:
        self._caps = Capabilities(block_size, num_blocks, 1 << 20, max_rows, 1 << 15, 20)
        self.entered = self.left = 0.0
        self._results: dict[int, StepResult] = {}

    def capabilities(self) -> Capabilities:
        return self._caps

    def execute(self, batch: Batch) -> StepResult:
        self.entered = time.perf_counter()
        count = len(batch.samples.token_index)
        if count not in self._results:
            self._results[count] = _answer(count)
        self.left = time.perf_counter()
        return self._results[count]

    def close(self) -> None:
        self._results.clear()


def _answer(count: int) -> StepResult:
    empty = np.zeros((count, 0), np.float32)
    ones = np.ones(count)
    return StepResult(
        ones.astype(np.int32),
        ones.astype(np.bool_),
        ones.astype(np.float32),
        empty.astype(np.int32),
        empty,
        {},
    )


def measure(
    rows: int, context: int, block_size: int, steps: int, sampling: SamplingParams
) -> dict[str, float]:
    """Median microseconds per decode step of `rows` sequences that start at `context` tokens."""
    blocks = rows * (-(-(context + steps + 8) // block_size) + 2)
    executor = InstantExecutor(block_size, blocks, rows)
    engine = Engine(executor, EngineOptions(max_batch_size=rows, max_prefill_token_num=1 << 20))
    random = np.random.default_rng(0)
    for i in range(rows):
        prompt = random.integers(0, 1 << 15, context, dtype=np.int32)
        engine.add(Request(str(i), prompt, steps + 4, sampling))
    start = time.perf_counter()
    engine.step()
    prefill = time.perf_counter() - start
    before, after = [], []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        before.append(executor.entered - start)
        after.append(time.perf_counter() - executor.left)
    total = [b + a for b, a in zip(before, after, strict=True)]
    parts = {"plan + pack": before, "commit": after, "step": total}
    medians = {name: statistics.median(values) * 1e6 for name, values in parts.items()}
    return medians | {"step p99": sorted(total)[int(0.99 * steps)] * 1e6, "first prefill step": prefill * 1e6}


def shares(model: Path, rows: int, steps: int, threads: int) -> tuple[float, float]:
    """(milliseconds of a decode step of `rows` sequences, share outside the parallel region), medians."""
    from lmdeploy import TurbomindEngineConfig
    from lmdeploy.runtime.build import build_engine
    from lmdeploy.runtime.resolve import resolve

    config = TurbomindEngineConfig(
        session_len=SHORT + steps + 80, max_batch_size=rows, num_threads=threads, cache_max_entry_count=0.1
    )
    engine = build_engine(resolve(str(model), config))
    executor: Any = engine.executor
    random = np.random.default_rng(0)
    for i in range(rows):
        prompt = random.integers(0, executor.capabilities().vocab_size, SHORT, dtype=np.int32)
        engine.add(Request(str(i), prompt, steps + rows + 8))
    started: set[str] = set()
    while len(started) < rows:
        started |= {event.request_id for event in engine.step()}
    executor.set_profile(True)
    times, host = [], []
    for _ in range(steps):
        begin = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begin)
        host.append(times[-1] - sum(op.seconds for op in executor.profile().values()))
    executor.close()
    share = statistics.median(h / t for h, t in zip(host, times, strict=True))
    return statistics.median(times) * 1e3, share


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--steps", type=positive, default=500)
    parser.add_argument("--block-size", type=positive, default=32)
    parser.add_argument("--model", type=model_path, help="model whose steps the overhead is compared with")
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--json", type=Path, help="file for the shares")
    args = parser.parse_args()
    names = ("plan + pack", "commit", "step", "step p99", "first prefill step")
    print("| rows x context | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 1) + "|")
    penalised = SamplingParams(temperature=0.8, repetition_penalty=1.1)
    cases = [
        (1, 512, ""),
        (8, 512, ""),
        (32, 512, ""),
        (64, 512, ""),
        (64, 2048, ""),
        (64, 512, ", penalties"),
    ]
    for rows, context, note in cases:
        sampling = penalised if note else SamplingParams()
        times = measure(rows, context, args.block_size, args.steps, sampling)
        print(f"| {rows} x {context}{note} | " + " | ".join(f"{times[n]:.0f}" for n in names) + " |")
    if args.model is not None:
        found = {rows: shares(args.model, rows, min(args.steps, 60), args.threads) for rows in (1, 64)}
        print("\n| sequences | ms a step | outside the parallel region |\n|---|---|---|")
        for rows, (milliseconds, share) in found.items():
            print(f"| {rows} | {milliseconds:.2f} | {share:.2%} |")
        if args.json is not None:
            args.json.write_text(json.dumps({str(rows): share for rows, (_, share) in found.items()}) + "\n")


if __name__ == "__main__":
    main()
