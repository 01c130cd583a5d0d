"""Prompts beside a running stream: how many tokens; what the start-up measurement makes of an executor."""

from __future__ import annotations

import numpy as np
import pytest
from engine_cases import drain, request
from hypothesis import given
from hypothesis import strategies as st

from lmdeploy.engine.batch import Batch
from lmdeploy.engine.fake import FakeExecutor
from lmdeploy.engine.loop import Engine, EngineOptions
from lmdeploy.engine.step_cost import GAP, StepCost, StreamGap, gap_seconds
from lmdeploy.runtime.step_timing import measure_step_cost

LINEAR = StepCost((1, 11), (1.0, 2.0))  # 0.9 + 0.1 a token


def stream_gap(cost: StepCost, decoding: int) -> StreamGap:
    return StreamGap(cost, decoding, gap_seconds(cost, decoding))


def test_between_and_beyond_the_measured_sizes_the_cost_is_linear() -> None:
    cost = StepCost((1, 4, 16), (1.0, 4.0, 10.0))
    assert [cost.step(n) for n in (1, 2, 4, 10, 16, 28)] == [1.0, 2.0, 4.0, 7.0, 10.0, 16.0]


def test_a_prompt_gets_what_keeps_the_step_within_the_gap() -> None:
    assert stream_gap(LINEAR, 1).take(100, 0) == 10  # 1.0 * 2 = 1.0 + 10 * 0.1
    assert stream_gap(LINEAR, 11).take(100, 0) == 20  # 2.0 * 2


def test_attention_to_a_long_context_counts() -> None:
    cost = StepCost((1, 11), (1.0, 2.0), pair=0.001)
    assert stream_gap(cost, 1).take(100, 900) == 1  # 0.1 + 0.9 a token
    assert stream_gap(cost, 1).take(100, 100) == 4  # 0.1 + 0.1 a token, and its own pairs


def test_the_first_prompt_always_gets_on_and_the_others_share_what_is_left() -> None:
    steep = stream_gap(StepCost((1, 2), (1.0, 9.0)), 1)
    assert [steep.take(50, 0), steep.take(50, 0)] == [1, 0]
    flat = stream_gap(LINEAR, 1)
    assert [flat.take(5, 0), flat.take(50, 0), flat.take(50, 0)] == [5, 5, 0]


@given(st.integers(1, 64), st.lists(st.integers(1, 300), min_size=1, max_size=5), st.floats(0, 0.01))
def test_the_whole_step_stays_within_the_gap(decoding: int, wanted: list[int], pair: float) -> None:
    cost = StepCost((1, 4, 16, 64), (1.0, 1.2, 2.0, 6.0), pair)
    gap = stream_gap(cost, decoding)
    taken = [gap.take(n, 10) for n in wanted]
    pairs = sum(n * (10 + n / 2) for n in taken)
    step = cost.step(decoding + sum(taken)) + pair * pairs
    assert taken[0] == 1 or step <= GAP * cost.step(decoding) * (1 + 1e-9)
    assert taken[0] >= 1


def test_only_a_reader_makes_prompts_wait() -> None:
    for streams, first in ((True, [1, 10]), (False, [1, 64])):
        steps: list[list[int]] = []
        executor = FakeExecutor(4, on_step=lambda b, s=steps: s.append(np.diff(b.row_start).tolist()))
        eng = Engine(executor, EngineOptions(max_prefill_token_num=64, step_cost=LINEAR))
        eng.add(request("stream", [1, 2, 3], 30, streams=streams))
        eng.step()
        eng.add(request("prompt", range(150), 1))
        drain(eng)
        assert steps[1] == first


class TimedExecutor(FakeExecutor):
    """Its steps last `base + each * tokens + pair * pairs` on its own clock."""

    now = 0.0
    base, each, pair = 1e-3, 1e-4, 1e-8

    def execute(self, batch: Batch):  # type: ignore[no-untyped-def]
        new = np.diff(batch.row_start)
        self.now += self.base + self.each * batch.num_tokens + self.pair * float(new @ batch.context_len)
        return None


def measured(**fields: int) -> tuple[TimedExecutor, StepCost]:
    executor = TimedExecutor(**{"block_size": 16, "num_blocks": 1024, **fields})
    return executor, measure_step_cost(executor, lambda: executor.now)


def test_the_measurement_finds_what_the_executor_costs() -> None:
    executor, cost = measured()
    for tokens in (1, 3, 16, 40, 500):
        assert cost.step(tokens) == pytest.approx(executor.base + executor.each * tokens)
    assert cost.pair == pytest.approx(executor.pair)


def test_a_slow_executor_is_measured_at_few_sizes_only() -> None:
    class Slow(TimedExecutor):
        base, each = 0.5, 0.1

    executor = Slow(block_size=16, num_blocks=1024)
    cost = measure_step_cost(executor, lambda: executor.now)
    assert cost.tokens == (1, 4)
    assert executor.now < 8


_TINY = [{"max_step_tokens": 1}, {"block_size": 1, "num_blocks": 1}, {"max_step_tokens": 5}]


@pytest.mark.parametrize("limits", _TINY)
def test_tiny_limits_are_measured_within_them(limits: dict[str, int]) -> None:
    _, cost = measured(**limits)
    assert cost.step(2) > cost.step(1)
