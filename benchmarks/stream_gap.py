"""How long a reader of one stream waits between two tokens while long prompts arrive, beside a quiet engine.

Drives the engine in this process: one stream, first alone, then with a next prompt as soon as the one before
is done. Prints the gaps and their ratio to the quiet median, and what the prompts got meanwhile.

    python benchmarks/stream_gap.py [MODEL] [--prompt-tokens 2000] [--prompts 4]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
from measure.arguments import described, model_path, positive
from measure.demo import demo_model

from lmdeploy.config import TurbomindEngineConfig
from lmdeploy.engine.loop import Engine
from lmdeploy.engine.request import Request
from lmdeploy.runtime.build import build_engine
from lmdeploy.runtime.resolve import resolve


def gaps_until(engine: Engine, done: Callable[[set[str]], bool]) -> list[float]:
    """Seconds between the stream's tokens until `done` says so of the requests that have ended."""
    gaps, last = [], time.perf_counter()
    ended: set[str] = set()
    while not done(ended):
        for event in engine.step():
            if event.request_id == "stream":
                now = time.perf_counter()
                gaps.append(now - last)
                last = now
            elif event.finish_reason is not None:
                ended.add(event.request_id)
    return gaps


def quiet_steps(engine: Engine, count: int) -> list[float]:
    """Seconds of `count` steps of the stream alone."""
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
    return seconds


def read_prompts(engine: Engine, count: int, tokens: int, vocab_size: int) -> tuple[list[float], float]:
    """Gaps of the stream while `count` prompts are computed one after another; their tokens a second."""
    random, gaps, start = np.random.default_rng(0), [], time.perf_counter()
    for number in range(count):
        name = f"prompt-{number}"
        prompt = random.integers(0, vocab_size, tokens, dtype=np.int32)
        engine.add(Request(name, prompt, max_new_tokens=1))
        gaps += gaps_until(engine, lambda ended, name=name: name in ended)
    return gaps, count * tokens / (time.perf_counter() - start)


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("model", nargs="?", type=model_path, default=demo_model())
    parser.add_argument("--prompt-tokens", type=positive, default=2000)
    parser.add_argument("--prompts", type=positive, default=4)
    parser.add_argument("--quiet-tokens", type=positive, default=100)
    parser.add_argument("--num-threads", type=positive, default=None)
    args = parser.parse_args()
    longest = 8 * args.prompt_tokens
    config = TurbomindEngineConfig(
        num_threads=args.num_threads, max_batch_size=4, cache_max_entry_count=0.2, session_len=4096
    )
    runtime = resolve(str(args.model), config)
    engine = build_engine(runtime)
    engine.add(Request("stream", np.ones(16, np.int32), max_new_tokens=longest, streams=True))
    engine.step()
    base = statistics.median(quiet_steps(engine, args.quiet_tokens))
    gaps, speed = read_prompts(engine, args.prompts, args.prompt_tokens, runtime.vocab_size)
    gaps.sort()
    print("| | ms | of the quiet median |\n|---|---|---|")
    print(f"| quiet, median | {1e3 * base:.2f} | 1 |")
    for name, gap in (
        ("beside prompts, median", statistics.median(gaps)),
        ("beside prompts, p99", gaps[int(0.99 * len(gaps))]),
        ("beside prompts, longest", gaps[-1]),
    ):
        print(f"| {name} | {1e3 * gap:.2f} | {gap / base:.2f} |")
    print(f"\nprompts: {speed:.0f} tokens/s beside the stream")


if __name__ == "__main__":
    main()
