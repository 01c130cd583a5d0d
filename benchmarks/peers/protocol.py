"""How the comparison talks to an engine's process: JSON lines, one request, one answer.

Runs inside the environments of the peers: standard library only. Each worker gives a `Generate`; timing,
random prompts and counting are the same for all. What the engine prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measure.machine import Watch, peak_megabytes

Prompts = list[list[int]]
Tick = Callable[[Iterable[int]], None]  # called after each step with the sequences that got a token in it
Generate = Callable[[Prompts, int, Tick], None]
Measure = Callable[[dict[str, Any]], dict[str, Any]]


class Clock:
    """Times and counts of the tokens of `sequences` prompts, each continued by `new` tokens."""

    def __init__(self, sequences: int, new: int, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self._new = now, new
        self._counts = [0] * sequences
        self._begin = now()
        self.first = 0.0  # seconds until every sequence had a token
        self._tokens = self._seconds = 0.0
        self._open = True

    def tick(self, advanced: Iterable[int]) -> None:
        """The named sequences have one token more."""
        at, started = self._now() - self._begin, bool(self.first)
        step = list(advanced)
        for i in step:
            self._counts[i] += 1
        if started and self._open:
            self._tokens += len(step)
            self._seconds = at - self.first
        if not started and min(self._counts) > 0:
            self.first = at
        self._open = max(self._counts) < self._new

    def rate(self) -> float:
        """Tokens a second from the step in which all had one to that which finishes the first of them."""
        if not self._seconds:
            raise RuntimeError("no step had all sequences decoding: more new tokens are needed")
        return self._tokens / self._seconds

    def check(self) -> None:
        if set(self._counts) != {self._new}:
            raise RuntimeError(f"{self._new} tokens were asked of each sequence, {self._counts} came")


def random_prompts(count: int, size: int, vocabulary: int, source: random.Random) -> Prompts:
    """Never the same twice, so that no prefix cache helps; ids of a model's rare ends are left out."""
    low, high = min(100, vocabulary // 4), min(vocabulary, 40_000)
    return [[source.randrange(low, high) for _ in range(size)] for _ in range(count)]


def timed(generate: Generate, vocabulary: int) -> Measure:
    """Measures one request with an engine that can be watched step by step."""
    source = random.Random()

    def measure(request: dict[str, Any]) -> dict[str, Any]:
        sequences, new = request["sequences"], request["new"]
        prompts = random_prompts(sequences, request["prompt"], vocabulary, source)
        clock = Clock(sequences, new)
        generate(prompts, new, clock.tick)
        clock.check()
        answer = {"prefill": sequences * request["prompt"] / clock.first}
        return {**answer, "decode": clock.rate()} if new > 1 else answer

    return measure


def serve(load: Callable[[], tuple[Measure, dict[str, Any]]]) -> None:
    """Loads, says {"ready": facts}, then answers requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    begin = time.perf_counter()
    measure, facts = load()
    say({"ready": {**facts, "load_seconds": time.perf_counter() - begin, "pid": os.getpid()}})
    for line in sys.stdin:
        watch, begin = Watch(), time.perf_counter()
        try:
            found = measure(json.loads(line))
        except (RuntimeError, ValueError, OSError, MemoryError) as error:
            say({"error": f"{type(error).__name__}: {error}"})
            continue
        spent = {"seconds": time.perf_counter() - begin, "cpu_seconds": watch.own(), "others": watch.others()}
        say({**found, **spent, "peak_mb": peak_megabytes()})
