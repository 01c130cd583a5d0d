"""Attention over long contexts: 16, 8 and 4 bits of cache beside a plain read, and a long prompt as a whole.

    python benchmarks/long_context.py [--threads 2] [--kernels avx512] [--engine-tokens 131072]

The first table decodes one token over 8,192 and 32,768 cached ones: bytes of keys and values a second
beside a plain read of the same memory by the same threads in alternating turns, and the time as a share of
that with 16 bits. Times are CPU seconds of the slowest thread. With `--engine-tokens` a tiny model (4 query
heads, 2 of keys and values) reads a prompt of that length with 8 and 4 bits, in two ways of cutting it; the
ids that follow must be equal.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
from measure.arguments import described, positive
from measure.kernel_arguments import add_kernel_arguments

from lmdeploy import TurbomindEngineConfig
from lmdeploy.cli.smoke import write_model
from lmdeploy.engine.request import Request
from lmdeploy.runtime.build import build_engine
from lmdeploy.runtime.resolve import resolve
from lmdeploy.turbomind import _turbomind

K = _turbomind.kernels
SHAPES = [(32, 8, 64), (32, 8, 128), (14, 2, 64)]  # query heads, heads of keys and values, dimensions
NEW_TOKENS = 16


def decode(args: argparse.Namespace, heads: int, kv_heads: int, dim: int, tokens: int) -> None:
    table, plain = K.Table.get(args.kernels), 0.0
    for bits in (16, 8, 4):
        block = K.KvCache(1, kv_heads, 64, dim, bits).nbytes
        per_sequence = tokens // 64
        sequences = max(1, (args.megabytes << 20) * bits // 16 // (per_sequence * block))
        cache = K.KvCache(sequences * per_sequence, kv_heads, 64, dim, bits)
        seconds, read = K.time_attend(table, cache, tokens, 1, heads // kv_heads, args.threads, args.repeats)
        one = seconds / sequences
        plain = plain or one
        print(
            f"{heads}/{kv_heads} heads of {dim}, {tokens:6d} tokens, {bits:2d} bits"
            f"  {cache.nbytes / seconds / 1e9:5.1f} GB/s  of read {read / seconds:4.2f}"
            f"  of 16 bits {one / plain:4.2f}",
            flush=True,
        )


def long_prompt(model: str, tokens: int, quant_policy: int, chunk: int) -> list[int]:
    """Ids that follow a random prompt; prints time and waste."""
    config = TurbomindEngineConfig(
        session_len=tokens + NEW_TOKENS,
        max_batch_size=1,
        quant_policy=quant_policy,
        max_prefill_token_num=chunk,
    )
    engine = build_engine(resolve(model, config))
    ids = np.random.default_rng(0).integers(0, 256, tokens).astype(np.int32)
    engine.add(Request("long", ids, max_new_tokens=NEW_TOKENS))
    begin, waste, out = time.perf_counter(), 0.0, list[int]()
    while engine.has_work:
        for event in engine.step():
            if event.error is not None:
                raise SystemExit(event.error)
            out += event.token_ids
        held = engine.stats().blocks_held * config.cache_block_seq_len
        if out and held:
            waste = 1 - (tokens + len(out) - 1) / held
    seconds = time.perf_counter() - begin
    print(
        f"{tokens} tokens, {quant_policy} bits, chunks of {chunk}: {seconds:.1f} s, waste {waste:.3%}",
        flush=True,
    )
    return out


def long_prompts(tokens: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name))
        path = Path(name) / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 2 * tokens}))
        for quant_policy in (8, 4):
            answers = [long_prompt(name, tokens, quant_policy, chunk) for chunk in (4096, 500)]
            if answers[0] != answers[1]:
                raise SystemExit(f"the ids depend on the chunks: {answers}")


def main() -> None:
    parser = described(__doc__)
    add_kernel_arguments(parser, "of cache with 16 bits to walk through")
    parser.add_argument("--repeats", type=positive, default=8)
    parser.add_argument("--engine-tokens", type=int, default=0, help="length of the prompt for the engine")
    args = parser.parse_args()
    for shape in SHAPES:
        for tokens in (8192, 32768):
            decode(args, *shape, tokens)
    if args.engine_tokens:
        long_prompts(args.engine_tokens)


if __name__ == "__main__":
    main()
