"""What happens to the requests of one model, as counts and times: the source of most metrics.

Hears of requests and steps from the client of the engine. Knows neither HTTP nor a format of metrics. Times
are seconds; those of an answer end when its token arrives in this process.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable

from lmdeploy.engine.request import Request, TokenEvent
from lmdeploy.errors import LMDeployError
from lmdeploy.runtime.messages import Step
from lmdeploy.serve.passage import Passage
from lmdeploy.serve.record import RECORD

_LATENCY = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_SECONDS = (0.001, *_LATENCY[2:], 200.0, 500.0, 1000.0)
_SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class Histogram:
    """Counts of values up to each bound; the last count is of those beyond all bounds."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        """(bound, number of values up to it), the last bound infinite."""
        total, out = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            out.append(("+Inf" if bound == float("inf") else str(float(bound)), float(total)))
        return out


def counting_bounds(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, ... and `most` as the last."""
    steps = (m * 10**e for e in range(12) for m in (1, 2, 5))
    return (*(float(s) for s in steps if s < most), float(most))


class RequestTimes:
    """Observer of one model's client: histograms and totals over all its requests."""

    def __init__(self, session_len: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running: dict[str, Passage] = {}
        lengths = counting_bounds(session_len)
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.cached_tokens = 0
        self.drafts = 0  # steps of a request that had guesses in them
        self.accepted: list[int] = []  # of those, how many were right at each position and all before it
        self.finished = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self.histograms = {
            "request_prompt_tokens": Histogram(lengths),
            "request_generation_tokens": Histogram(lengths),
            "request_cached_tokens": Histogram((0.0, *lengths)),
            "request_cache_hit_ratio": Histogram(_SHARES),
            "iteration_tokens_total": Histogram(counting_bounds(65536)),
            "time_to_first_token_seconds": Histogram(_SECONDS),
            "iter_token_latency": Histogram(_LATENCY),
            "time_per_output_token_seconds": Histogram(_LATENCY),
            "e2e_request_latency_seconds": Histogram(_SECONDS),
            "request_queue_time_seconds": Histogram(_SECONDS),
            "request_inference_time_seconds": Histogram(_SECONDS),
            "request_prefill_time_seconds": Histogram(_SECONDS),
            "request_decode_time_seconds": Histogram(_SECONDS),
        }
        self._gaps = self.histograms["iter_token_latency"]
        self._steps = self.histograms["iteration_tokens_total"]

    @property
    def routed(self) -> int:
        """Requests that are with the engine now."""
        return len(self._running)

    # The client calls these.

    def submitted(self, requests: Iterable[Request]) -> None:
        """Called in the context of the HTTP request that they are part of."""
        now, record = self._clock(), RECORD.get()
        for request in requests:
            passage = Passage(request.request_id, len(request.prompt_ids), now)
            self._running[request.request_id] = passage
            if record is not None:
                record.passages.append(passage)

    def stepped(self, step: Step) -> None:
        now = self._clock()
        if step.tokens:
            self._steps.observe(step.tokens)
        for name in step.started:
            passage = self._running.get(name)
            if passage is not None:
                self._start(passage, max(now - step.seconds, passage.submitted))
        for event in step.events:
            passage = self._running.get(event.request_id)
            if passage is not None:
                self._take(passage, event, now)

    def ended(self, request_ids: Iterable[str], error: LMDeployError | None, complete: bool = False) -> None:
        reason = "error" if error is not None else "stop" if complete else "abort"
        for name in request_ids:
            passage = self._running.get(name)
            if passage is not None:
                self._end(name, passage, reason, self._clock())

    def _start(self, passage: Passage, now: float) -> None:
        passage.started = now
        self.prompt_tokens += passage.prompt_tokens
        self._observe("request_queue_time_seconds", now - passage.submitted)

    def _take(self, passage: Passage, event: TokenEvent, now: float) -> None:
        count = len(event.token_ids)
        if count and passage.first:
            self._gaps.observe(now - passage.last)
        elif count:
            passage.first = now
            passage.cached_tokens = event.cached_tokens
            self.cached_tokens += event.cached_tokens
            self._observe("time_to_first_token_seconds", now - passage.submitted)
            self._observe("request_prefill_time_seconds", now - passage.started)
        if event.drafted_tokens:
            self._count_drafts(event)
        if count:
            passage.last = now
            passage.generated += count
            self.generated_tokens += count
        if event.finish_reason is not None:
            self._end(event.request_id, passage, event.finish_reason, now)

    def _count_drafts(self, event: TokenEvent) -> None:
        self.drafts += 1
        self.accepted += [0] * (event.drafted_tokens - len(self.accepted))
        for position in range(event.accepted_tokens):
            self.accepted[position] += 1

    def _end(self, name: str, passage: Passage, reason: str, now: float) -> None:
        del self._running[name]
        passage.reason, passage.ended = reason, now
        self.finished[reason] += 1
        if reason in ("stop", "length"):
            self._count(passage)

    def _count(self, passage: Passage) -> None:
        """The figures of an answer that was finished."""
        self._observe("e2e_request_latency_seconds", passage.ended - passage.submitted)
        self._observe("request_inference_time_seconds", passage.ended - passage.started)
        self._observe("request_decode_time_seconds", passage.last - passage.first)
        if passage.generated > 1:
            each = (passage.last - passage.first) / (passage.generated - 1)
            self._observe("time_per_output_token_seconds", each)
        self._observe("request_prompt_tokens", passage.prompt_tokens)
        self._observe("request_generation_tokens", passage.generated)
        self._observe("request_cached_tokens", passage.cached_tokens)
        self._observe("request_cache_hit_ratio", passage.cached_tokens / max(passage.prompt_tokens, 1))

    def _observe(self, name: str, value: float) -> None:
        self.histograms[name].observe(value)
