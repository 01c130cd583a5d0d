"""How long short requests wait for their first token beside long prompts, with and without lanes.

Drives the engine in this process, in real time: short requests arrive as a Poisson process at a share of what
the engine can serve of them, long prompts at a share of what it can read of those; the same arrivals in each
run. Prints the first tokens of the short ones alone, beside long ones, and beside long ones in their lane.

    python benchmarks/lanes.py [MODEL] [--seconds 180] [--load 0.3] [--long-tokens 8000] [--seed 1]
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np
from measure.arguments import described, model_path, positive
from measure.demo import demo_model

from lmdeploy.config import TurbomindEngineConfig
from lmdeploy.engine.loop import Engine
from lmdeploy.engine.request import Request
from lmdeploy.runtime.build import build_engine
from lmdeploy.runtime.resolve import resolve

SHORT, ANSWER, AT_ONCE = (
    128,
    32,
    32,
)  # tokens of a short prompt and its answer; requests that show the capacity


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and when it comes, in seconds from the beginning."""

    at: float
    name: str
    tokens: int
    answer: int


def engine_for(model: str, long_tokens: int, threshold: int) -> tuple[Engine, int]:
    """(engine, size of its vocabulary); threshold 0: without lanes."""
    config = TurbomindEngineConfig(
        session_len=long_tokens + ANSWER, max_batch_size=AT_ONCE, long_prompt_threshold=threshold
    )
    runtime = resolve(model, config)
    return build_engine(runtime), runtime.vocab_size


def play(engine: Engine, arrivals: list[Arrival], vocab_size: int, seed: int) -> dict[str, float]:
    """Seconds from each arrival to its first token."""
    random, waiting, first = np.random.default_rng(seed), list(arrivals), {}
    due = {a.name: a.at for a in arrivals}
    begin = time.perf_counter()
    while waiting or engine.has_work:
        now = time.perf_counter() - begin
        while waiting and waiting[0].at <= now:
            one = waiting.pop(0)
            prompt = random.integers(0, vocab_size, one.tokens, dtype=np.int32)
            engine.add(Request(one.name, prompt, one.answer, streams=True))
        if not engine.has_work:
            time.sleep(max(0.0, waiting[0].at - now))
            continue
        for event in engine.step():
            if event.error:
                raise SystemExit(event.error)
            first.setdefault(event.request_id, time.perf_counter() - begin - due[event.request_id])
    return first


def capacity(engine: Engine, tokens: int, answer: int, count: int, vocab_size: int) -> float:
    """Requests a second when `count` of them are there at once."""
    begin = time.perf_counter()
    play(engine, [Arrival(0.0, f"c{i}", tokens, answer) for i in range(count)], vocab_size, seed=0)
    return count / (time.perf_counter() - begin)


def poisson(rate: float, seconds: float, kind: str, tokens: int, answer: int, seed: int) -> list[Arrival]:
    gaps = np.random.default_rng(seed).exponential(1 / rate, int(3 * rate * seconds) + 10)
    times = [at for at in np.cumsum(gaps).tolist() if at < seconds]
    return [Arrival(at, f"{kind}{i}", tokens, answer) for i, at in enumerate(times)]


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("model", nargs="?", type=model_path, default=demo_model())
    parser.add_argument("--seconds", type=positive, default=180)
    parser.add_argument("--load", type=float, default=0.3)
    parser.add_argument("--long-tokens", type=positive, default=8000)
    parser.add_argument("--threshold", type=positive, default=1024)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    runs = (("short ones alone", 0, False), ("without lanes", 0, True), ("with lanes", args.threshold, True))
    short: list[Arrival] = []
    long: list[Arrival] = []
    base = 0.0
    for name, threshold, mixed in runs:
        engine, vocab_size = engine_for(str(args.model), args.long_tokens, threshold)
        if not short:
            rate = args.load * capacity(engine, SHORT, ANSWER, AT_ONCE, vocab_size)
            short = poisson(rate, args.seconds, "s", SHORT, ANSWER, args.seed)
            slow = args.load * capacity(engine, args.long_tokens, 1, 1, vocab_size)
            long = poisson(slow, args.seconds, "l", args.long_tokens, 1, args.seed + 1)
            print(f"{len(short)} short requests ({rate:.2f}/s), {len(long)} long ones ({slow:.3f}/s)\n")
            print(
                "| short requests | p50 s | p99 s | p99 / alone | long ones, p50 s |\n|---|---|---|---|---|"
            )
        arrivals = sorted([*short, *(long if mixed else [])], key=lambda a: a.at)
        first = play(engine, arrivals, vocab_size, args.seed)
        engine.close()
        waits = sorted(first[a.name] for a in short)
        p99 = waits[int(0.99 * len(waits))]
        base = base or p99
        others = f"{statistics.median(first[a.name] for a in long):.1f}" if mixed and long else ""
        row = f"| {name} | {statistics.median(waits):.3f} | {p99:.3f} | {p99 / base:.2f} | {others} |"
        print(row, flush=True)


if __name__ == "__main__":
    main()
