"""The parts of the metrics, without a server: histograms, times of a request, what binds."""

from __future__ import annotations

import pytest
from serve_fakes import request

from lmdeploy.engine.request import TokenEvent
from lmdeploy.runtime.messages import Step
from lmdeploy.serve.binding import WINDOW, Watch
from lmdeploy.serve.monitor import status_line
from lmdeploy.serve.request_times import Histogram, RequestTimes, counting_bounds


def test_histogram_counts_up_to_and_with_its_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2.0), ("2.0", 4.0), ("+Inf", 5.0)]
    assert histogram.sum == 8.0
    assert counting_bounds(40) == (1.0, 2.0, 5.0, 10.0, 20.0, 40.0)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_times_of_one_request() -> None:
    clock = Clock()
    times = RequestTimes(512, clock)
    times.submitted([request("a", "x" * 10, 3)])
    clock.now += 2.0  # one in the queue, one in the step
    times.stepped(Step([TokenEvent("a", (1,), cached_tokens=4)], seconds=1.0, tokens=10, started=("a",)))
    clock.now += 0.5
    times.stepped(Step([TokenEvent("a", (2,))], seconds=0.5, tokens=1))
    clock.now += 0.5
    times.stepped(Step([TokenEvent("a", (3,), finish_reason="length")], seconds=0.5, tokens=1))
    sums = {name: histogram.sum for name, histogram in times.histograms.items()}
    assert sums["request_queue_time_seconds"] == 1.0
    assert sums["request_prefill_time_seconds"] == 1.0
    assert sums["time_to_first_token_seconds"] == 2.0
    assert sums["request_decode_time_seconds"] == 1.0
    assert sums["time_per_output_token_seconds"] == 0.5
    assert sums["request_inference_time_seconds"] == 2.0
    assert sums["e2e_request_latency_seconds"] == 3.0
    assert sums["request_cache_hit_ratio"] == 0.4
    assert (times.prompt_tokens, times.generated_tokens, times.cached_tokens) == (10, 3, 4)
    assert times.routed == 0


def test_what_binds_is_what_took_most_of_the_last_window() -> None:
    clock = Clock()
    watch = Watch(clock)
    assert watch.binding().bound == "no_load"
    watch.add({"idle": 100.0, "compute": 0.0, "bound": {}})
    clock.now += WINDOW
    watch.add({"idle": 101.0, "compute": 9.0, "bound": {"compute": 3.0, "kv_blocks": 6.0}})
    binding = watch.binding()
    assert (binding.bound, binding.utilisation) == ("kv_blocks", 0.9)
    assert binding.shares["no_load"] == pytest.approx(0.1)
    clock.now += WINDOW
    watch.add({"idle": 111.0, "compute": 9.0, "bound": {"compute": 3.0, "kv_blocks": 6.0}})
    assert watch.binding().bound == "no_load"
    watch.add({"idle": 0.0, "compute": 1.0, "bound": {"compute": 1.0}})  # started again
    assert watch.binding().bound == "compute"


def test_the_line_says_what_to_do() -> None:
    clock = Clock()
    watch = Watch(clock)
    watch.add({"idle": 1.0, "bound": {"max_batch_size": 9.0}})
    stats = {"running": 8, "waiting": 3, "blocks_held": 64, "blocks_total": 128}
    rates = {"prompt": 100.0, "generated": 50.0, "cached": 25.0}
    line = status_line("m", "ready", stats, rates, watch.binding())
    assert line == (
        "m: running 8, waiting 3; 100 prompt and 50 generated tokens/s; KV cache 50%, prefix hits 25%; "
        "U 90%; bound by max_batch_size for 90% of the time (requests wait for a row: raise --max-batch-size)"
    )
    assert status_line("m", "stalled", stats, rates, watch.binding()) == "m: the engine is stalled"
