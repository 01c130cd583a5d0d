"""Time the engine spends on one decode step, apart from computing it.

Drives the real engine over an executor that answers at once with prepared arrays, and prints microseconds per
step (median) as a Markdown table: the whole `step()`, and its parts plan, pack and commit.

    python benchmarks/engine_overhead.py
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from lmdeploy.engine.batch import Batch, StepResult
from lmdeploy.engine.executor import Capabilities
from lmdeploy.engine.loop import Engine, EngineOptions
from lmdeploy.engine.request import Request, SamplingParams


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--block-size", type=int, default=32)
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


if __name__ == "__main__":
    main()
