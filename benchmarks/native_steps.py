"""Whole steps of the native engine beside the limits of the same machine in the same process.

    python benchmarks/native_steps.py [--model PATH] [--accuracy fast] [--rows 1,2]

Rows decode one token each at a short context; `prefill` is one prompt. Printed: the step's time,
2 x parameters x rows / time as a share of the int8 dot-product peak (attention is in the time, not in the
count), and the time divided by what a plain read of all packed weights would take. random_models.py writes
models of other shapes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from measure.arguments import described, model_path, positive
from measure.demo import demo_model

from lmdeploy.engine.batch import Batch, SampleColumns
from lmdeploy.engine.executor import Limits
from lmdeploy.models.registry import open_checkpoint
from lmdeploy.models.spec import ModelSpec
from lmdeploy.turbomind import _turbomind
from lmdeploy.turbomind.executor import NativeConfig, TurbomindExecutor

K = _turbomind.kernels
BLOCK, CONTEXT = 64, 64


def samples(tokens: list[int]) -> SampleColumns:
    """Greedy."""
    n = len(tokens)
    starts, none, ints = np.zeros(n + 1, np.int32), np.zeros(0, np.int32), np.zeros(n, np.int32)
    floats, ones = np.zeros(n, np.float32), np.ones(n, np.float32)
    return SampleColumns(
        np.array(tokens, np.int32), ints - 1, floats, ints, ones, floats, ones, floats, floats,
        np.zeros(n, np.uint64), np.zeros(n, np.int64), ints - 1, starts, none, np.zeros(0, np.float32),
        starts, none, none, np.zeros(n, np.bool_),
    )  # fmt: skip


def batch(rows: int, new: int, context: int) -> Batch:
    """`rows` sequences of `new` tokens each after `context` cached ones, one sample each."""
    per_row = -(-(context + new) // BLOCK)
    return Batch(
        (np.arange(rows * new) * 7 % 1000).astype(np.int32),
        np.arange(0, rows * new + 1, new, dtype=np.int32),
        np.full(rows, context, np.int32),
        np.arange(0, rows * per_row + 1, per_row, dtype=np.int32),
        np.arange(rows * per_row, dtype=np.int32),
        samples([new * (i + 1) - 1 for i in range(rows)]),
    )


def limits_of_machine(threads: int) -> tuple[float, float]:
    """Bytes a second of a plain read, operations a second of the int8 dot product."""
    n, k = 8192, 2048
    matrices = []
    for _ in range(24):
        matrix = K.PackedMatrix(K.W4_ZERO, n, k, 128)
        scales = np.full(n * k // 128, 0.01, np.float16).view(np.uint16)
        matrix.pack(
            np.zeros(n * k, np.uint8), scales, np.zeros(n * k // 128, np.uint8), scales, k, 128, 0, n, 0
        )
        matrices.append(matrix)
    table = K.Table.get(K.active())
    rows = table.prepare(np.ones((1, k), np.float32), 128)
    _, read, peak = K.time_matmul(table, matrices, rows, threads, 8)
    return sum(m.nbytes for m in matrices) / read, peak


def parameters(spec: ModelSpec) -> tuple[int, int]:
    """Values in the linear layers, and in the head."""
    shapes = dict(spec.tensors())
    body = sum(s[0] * s[1] for n, s in shapes.items() if len(s) == 2 and n.startswith("layers."))
    return body, spec.hidden_size * spec.vocab_size


def steps(args: argparse.Namespace) -> Iterator[tuple[str, int, int, Batch]]:
    """Name, tokens, sampled rows and batch of each step."""
    for rows in (int(x) for x in args.rows.split(",") if x):
        yield f"{rows} rows", rows, rows, batch(rows, 1, args.context)
    for tokens in (int(x) for x in args.prefill.split(",") if x):
        yield f"prefill {tokens}", tokens, 1, batch(1, tokens, 0)


def best_time(executor: Any, step: Batch, seconds: float) -> tuple[float, float]:
    """Best and median seconds of repeated steps."""
    executor.execute(step)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        begin = time.perf_counter()
        executor.execute(step)
        times.append(time.perf_counter() - begin)
    return min(times), statistics.median(times)


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--model", type=model_path, default=demo_model(), help="the demo model when left out")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--accuracy", default="auto", choices=("exact", "auto", "fast"))
    parser.add_argument("--rows", default="1,2,4,6,8,16,32,64")
    parser.add_argument("--prefill", default="512")
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--seconds", type=float, default=0.7, help="for each step")
    args = parser.parse_args()
    checkpoint = open_checkpoint(args.model)
    all_steps = list(steps(args))
    blocks = max(len(step.block_ids) for *_, step in all_steps)
    tokens = max(count for _, count, _, _ in all_steps)
    limits = Limits(max(64, tokens), tokens, 4096, BLOCK, args.threads)
    executor = TurbomindExecutor(NativeConfig(limits, blocks, args.accuracy), checkpoint.spec, checkpoint)
    bandwidth, peak = limits_of_machine(args.threads)
    body, head = parameters(checkpoint.spec)
    size = executor._model.weight_bytes_used
    print(
        f"{args.model}, {args.accuracy}: {size / 1e6:.1f} MB, read {bandwidth / 1e9:.1f} GB/s,"
        f" int8 {peak / 1e9:.0f} GOP/s"
    )
    for name, count, sampled, step in all_steps:
        best, median = best_time(executor, step, args.seconds)
        share = 2 * (body * count + head * sampled * (count == sampled)) / best / peak
        ratio = best / (size / bandwidth)
        print(
            f"{name:>12} {1e3 * best:8.2f} ms (median {1e3 * median:.2f})  of int8 peak {share:.2f}"
            f"  x read {ratio:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
