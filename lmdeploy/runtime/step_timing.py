"""How long this executor takes for steps of a few sizes, measured once before the first request.

Owns the measuring; what follows from the figures is the scheduler's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from lmdeploy.engine.batch import Packer
from lmdeploy.engine.executor import Executor
from lmdeploy.engine.request import Request, Sequence
from lmdeploy.engine.step_cost import StepCost

_SIZES = (1, 4, 16, 64)  # new tokens in a step
_ENOUGH = 0.25  # seconds after which no larger step is measured
_CONTEXT_TOKENS = 8  # new tokens behind a long context
_LONGEST = 8192  # tokens of that context


def measure_step_cost(executor: Executor, clock: Callable[[], float] = time.perf_counter) -> StepCost:
    """Run a few steps of one sequence on an executor that holds no request yet, and take the shortest times.

    What the steps leave in the cache is never read: no sequence owns those blocks yet.
    """
    caps = executor.capabilities()
    capacity = caps.block_size * caps.num_blocks
    sizes = [n for n in _SIZES if n <= min(caps.max_step_tokens, capacity)]
    started = clock()
    _seconds(executor, clock, 1, 0)  # the first step finds everything cold
    seconds: list[float] = []
    for count in sizes:
        if len(seconds) > 1 and clock() - started > _ENOUGH:
            break
        tries = 3 if count < _SIZES[2] else 1
        seconds.append(min(_seconds(executor, clock, count, 0) for _ in range(tries)))
    if len(seconds) == 1:
        return StepCost((1, 2), (seconds[0], 2 * seconds[0]))
    for i in range(1, len(seconds)):  # noise must not make more tokens cheaper
        seconds[i] = max(seconds[i], seconds[i - 1])
    cost = StepCost(tuple(sizes[: len(seconds)]), tuple(seconds))
    return StepCost(cost.tokens, cost.seconds, _pair_seconds(executor, clock, cost, capacity))


def _pair_seconds(executor: Executor, clock: Callable[[], float], cost: StepCost, capacity: int) -> float:
    """Seconds for one new token and one before it, from a few tokens behind a long context."""
    context = min(_LONGEST, capacity) - _CONTEXT_TOKENS
    if context < 1 or executor.capabilities().max_step_tokens < _CONTEXT_TOKENS:
        return 0.0
    seconds = _seconds(executor, clock, _CONTEXT_TOKENS, context)
    return max(seconds - cost.step(_CONTEXT_TOKENS), 0.0) / (_CONTEXT_TOKENS * context)


def _seconds(executor: Executor, clock: Callable[[], float], count: int, context: int) -> float:
    """One step of `count` new tokens behind `context` tokens that are taken as computed."""
    size = executor.capabilities().block_size
    seq = Sequence(Request("", np.zeros(context + count, np.int32), max_new_tokens=1), order=0)
    seq.append_blocks(list(range(-(-seq.length // size))))
    seq.num_computed = context
    batch = Packer(size).pack([(seq, count)])
    start = clock()
    executor.execute(batch)
    return clock() - start
