"""Speed of the native kernels as a share of what the machine can do in the same run.

    python benchmarks/native_kernels.py [--threads 2] [--kernels avx512] [--quick]

One row is compared with a plain read of the same bytes, many rows with the dot-product peak divided by
the number of activation planes, attention with a plain read of the cache. Times are CPU seconds of the
slowest thread, the best of several alternating repetitions: other processes disturb only through caches and
memory, and both sides alike.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from measure.arguments import described, positive
from measure.kernel_arguments import add_kernel_arguments

from lmdeploy.turbomind import _turbomind

K = _turbomind.kernels
KINDS = {"w4zero": K.W4_ZERO, "w4min": K.W4_MIN, "int8": K.INT8, "bf16": K.BF16}
SHAPES = [(8192, 2048), (2048, 8192), (1536, 576)]
ROWS = [1, 2, 4, 8, 16, 32, 128]


def make_matrix(kind: str, n: int, k: int, group: int) -> Any:
    rng = np.random.default_rng(0)
    matrix = K.PackedMatrix(KINDS[kind], n, k, 0 if kind == "bf16" else group)
    unit = 2 if kind == "bf16" else 1
    codes = rng.integers(0, 16, n * k * unit).astype(np.uint8)
    groups = 0 if kind == "bf16" else n * (-(-k // group))
    scales = np.full(groups, 0.01, np.float16).view(np.uint16)
    zeros = np.full(groups, 8, np.uint8)
    matrix.pack(codes, scales, zeros, scales, k, group, 0, n, 0)
    return matrix


def prepare(table: Any, kind: str, rows: int, k: int, group: int, threshold: float) -> Any:
    x = np.random.default_rng(1).standard_normal((rows, k)).astype(np.float32)
    if kind == "bf16":
        return table.prepare(x, 0, int8=False, bf16=2)
    return table.prepare(x, group, threshold=threshold)


def matmul_rows(args: argparse.Namespace, kind: str, group: int, n: int, k: int) -> None:
    table = K.Table.get(args.kernels)
    one = make_matrix(kind, n, k, group)
    copies = max(1, (args.megabytes << 20) // one.nbytes)
    matrices = [one] + [make_matrix(kind, n, k, group) for _ in range(copies - 1)]
    for rows in ROWS:
        used = matrices if rows <= 32 else matrices[: max(1, copies // 16)]
        a = prepare(table, kind, rows, k, group, 0.0 if args.planes == 2 else np.inf)
        seconds, read, peak = K.time_matmul(table, used, a, args.threads, args.repeats)
        size, operations = one.nbytes * len(used), 2.0 * rows * n * k * len(used)
        planes = args.planes if kind != "bf16" else 1 if args.kernels == "avx2" else 2
        print(
            f"{kind:7s} g{group:<4d} n={n:<5d} k={k:<5d} m={rows:<4d} {size / seconds / 1e9:6.1f} GB/s"
            f"  {operations / seconds / 1e9:7.1f} GOP/s  of read {read / seconds:4.2f}"
            f"  of peak {operations * planes / seconds / peak:4.2f}",
            flush=True,
        )


def attention(args: argparse.Namespace, kv_heads: int, heads: int, dim: int, tokens: int, block: int) -> None:
    table = K.Table.get(args.kernels)
    per_block = kv_heads * 2 * block * dim * 2
    blocks = max(tokens // block, (args.megabytes << 20) // per_block)
    cache = K.KvCache(blocks, kv_heads, block, dim)
    for rows in (1, 16):
        seconds, read = K.time_attend(table, cache, tokens, rows, heads, args.threads, args.repeats)
        sequences = blocks // (tokens // block)
        size = sequences * (tokens // block) * per_block
        flops = 4.0 * rows * heads * kv_heads * tokens * dim * sequences
        form = f"attention {kv_heads * heads}/{kv_heads} heads, dim {dim}, {tokens} tokens, block {block}"
        print(
            f"{form}, rows {rows:<2d} {size / seconds / 1e9:6.1f} GB/s"
            f"  {flops / seconds / 1e9:6.1f} GFLOP/s  of read {read / seconds:4.2f}",
            flush=True,
        )


def main() -> None:
    parser = described(__doc__)
    add_kernel_arguments(parser, "bytes of weights or cache to walk through")
    parser.add_argument("--planes", type=int, default=2, choices=(1, 2), help="of int8 activations")
    parser.add_argument("--repeats", type=positive, default=12)
    parser.add_argument("--quick", action="store_true", help="one shape and W4 only")
    args = parser.parse_args()
    for kind, group in [("w4min", 32), ("w4zero", 128), ("int8", 32), ("bf16", 0)][: 2 if args.quick else 4]:
        for n, k in SHAPES[: 1 if args.quick else 3]:
            matmul_rows(args, kind, group, n, k)
    attention(args, 3, 3, 64, 1024, 16)
    attention(args, 8, 4, 128, 1024, 32)


if __name__ == "__main__":
    main()
