"""GET /metrics: what is known of the server and its engines, in the words of Prometheus.

Owns names, labels and help texts. Names and meanings are those LMDeploy's users know, with what they lack
beside them: queue, cache blocks, preemption, utilisation, what binds. Knows where each figure is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry
from starlette.responses import Response

from lmdeploy import __version__
from lmdeploy.errors import EngineDeadError
from lmdeploy.runtime.machine import resident_bytes
from lmdeploy.serve.binding import BOUNDS
from lmdeploy.serve.served import Served, Server

PREFIX = "lmdeploy:"
_LABELS = ("model_name", "engine")
_PATIENCE = 0.5  # seconds an engine has to answer; then its last answer stands

_HISTOGRAMS = {
    "request_prompt_tokens": "prompt tokens of a finished request",
    "request_generation_tokens": "generated tokens of a finished request",
    "request_cached_tokens": "prompt tokens a finished request took from the prefix cache",
    "request_cache_hit_ratio": "the same as a share of its prompt",
    "iteration_tokens_total": "tokens computed in an engine step",
    "time_to_first_token_seconds": "from submission to the first token",
    "iter_token_latency": "seconds between two tokens of a request",
    "time_per_output_token_seconds": "the same as the mean of a finished request",
    "e2e_request_latency_seconds": "from submission to the end",
    "request_queue_time_seconds": "from submission to the first step that computes some of the prompt",
    "request_inference_time_seconds": "from that step to the end",
    "request_prefill_time_seconds": "from that step to the first token",
    "request_decode_time_seconds": "from the first token to the last",
}


class _Reading(NamedTuple):
    """Where a figure comes from: of one model, with the latest answer of its engine (empty: none yet)."""

    help: str
    read: Callable[[Served, Mapping[str, Any]], float]


def _stat(name: str) -> Callable[[Served, Mapping[str, Any]], float]:
    return lambda served, stats: float(stats.get(name, 0))


def _total(name: str) -> Callable[[Served, Mapping[str, Any]], float]:
    return lambda served, stats: float(stats.get("totals", {}).get(name, 0))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _held(stats: Mapping[str, Any]) -> float:
    return float(stats.get("blocks_held", 0))


def _waste(served: Served, stats: Mapping[str, Any]) -> float:
    allocated = _held(stats) * served.client.info.get("block_size", 0)
    return _share(stats.get("unused_tokens", 0), allocated)


_GAUGES = {
    "num_requests_succeeded": _Reading(
        "requests finished by their answer",
        lambda served, _: served.times.finished["stop"] + served.times.finished["length"],
    ),
    "num_requests_failed": _Reading(
        "requests that ended in an error", lambda served, _: served.times.finished["error"]
    ),
    "num_api_requests_routed": _Reading("requests the engine has now", lambda s, _: s.times.routed),
    "num_api_requests_waiting": _Reading(
        "requests that wait for the engine to be ready", lambda s, _: s.client.waiting
    ),
    "num_requests_running": _Reading("requests that hold a row of the engine", _stat("running")),
    "num_requests_waiting": _Reading("requests in the engine's queue", _stat("waiting")),
    "gpu_cache_usage_perc": _Reading(
        "share of the KV cache's blocks that requests hold, whatever the device",
        lambda s, stats: _share(_held(stats), stats.get("blocks_total", 0)),
    ),
    "prefix_cache_hit_rate": _Reading(
        "share of all prompt tokens that came from the prefix cache",
        lambda s, stats: _share(_total("cached_tokens")(s, stats), _total("prompt_tokens")(s, stats)),
    ),
    "spec_decode_mean_accept_rate": _Reading(
        "share of the guessed tokens that were right",
        lambda s, stats: _share(_total("accepted_tokens")(s, stats), _total("drafted_tokens")(s, stats)),
    ),
    "spec_decode_mean_accept_length": _Reading(
        "tokens that a step with guesses brings: the right guesses and one more",
        lambda s, _: 1.0 + _share(sum(s.times.accepted), s.times.drafts) if s.times.drafts else 0.0,
    ),
    "kv_cache_waste_perc": _Reading("share of the places in held blocks that no token has taken", _waste),
    "lane_long_kv_blocks": _Reading("cache blocks that long prompts hold", _stat("long_blocks")),
    "kv_cache_waste_tokens": _Reading(
        "places in held blocks that no token has taken", _stat("unused_tokens")
    ),
    "engine_utilisation": _Reading(
        "compute / (compute + idle) of the engine over the last 10 s",
        lambda s, _: s.watch.binding().utilisation,
    ),
    "engine_up": _Reading("1 when the engine takes requests", lambda s, _: s.client.ready),
    "engine_resident_memory_bytes": _Reading(
        "memory of the engine process in RAM",
        lambda s, _: resident_bytes(s.client.pid) if s.client.pid else 0,
    ),
}

_COUNTERS = {
    "prompt_tokens": _Reading("prompt tokens of started requests", lambda s, _: s.times.prompt_tokens),
    "generation_tokens": _Reading("generated tokens", lambda s, _: s.times.generated_tokens),
    "cached_tokens": _Reading("prompt tokens from the prefix cache", lambda s, _: s.times.cached_tokens),
    "spec_decode_num_drafts": _Reading("steps of a request with guesses", lambda s, _: s.times.drafts),
    "spec_decode_num_draft_tokens": _Reading("tokens guessed", _total("drafted_tokens")),
    "spec_decode_num_accepted_tokens": _Reading("tokens guessed rightly", _total("accepted_tokens")),
    "engine_steps": _Reading("steps of the engine", _total("steps")),
    "engine_computed_tokens": _Reading("tokens in all steps, recomputed ones too", _total("computed_tokens")),
    "num_preemptions": _Reading("sequences that had to give up their blocks", _total("preemptions")),
    "preemption_resumed_tokens": _Reading(
        "tokens that preempted sequences found again in the cache", _total("resumed_tokens")
    ),
    "shared_blocks": _Reading("blocks taken up while another request held them", _total("shared_blocks")),
    "num_requests_refused": _Reading("requests that could never run", _total("refused")),
    "engine_compute_seconds": _Reading("time in steps", _stat("compute")),
    "engine_idle_seconds": _Reading("time without work", _stat("idle")),
    "engine_restarts": _Reading("starts after a death", lambda s, _: s.client.restarts),
}


class _Collector(Collector):
    """Reads every figure at the time of a scrape."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def collect(self) -> Iterator[Metric]:
        yield from self._about()
        for name, reading in _GAUGES.items():
            yield self._filled(GaugeMetricFamily(PREFIX + name, reading.help, labels=_LABELS), reading)
        for name, reading in _COUNTERS.items():
            yield self._filled(CounterMetricFamily(PREFIX + name, reading.help, labels=_LABELS), reading)
        yield from self._by_kind()
        for name, help_ in _HISTOGRAMS.items():
            family = HistogramMetricFamily(PREFIX + name, help_, labels=_LABELS)
            for served in self._server.models:
                histogram = served.times.histograms[name]
                family.add_metric(_labels(served), histogram.cumulative(), histogram.sum)
            yield family
        yield from self._http()

    def _filled(self, family: Any, reading: _Reading) -> Metric:
        for served in self._server.models:
            family.add_metric(_labels(served), float(reading.read(served, served.client.last_stats)))
        metric: Metric = family
        return metric

    def _about(self) -> Iterator[Metric]:
        build = InfoMetricFamily(PREFIX + "build", "the program that runs")
        build.add_metric([], {"version": __version__, "python": platform.python_version()})
        yield build
        backend = InfoMetricFamily(PREFIX + "backend_config", "what the engine was made with", labels=_LABELS)
        cache = InfoMetricFamily(PREFIX + "cache_config", "the KV cache", labels=_LABELS)
        for served in self._server.models:
            backend.add_metric(_labels(served), dict(served.about))
            info = served.client.info
            shown = {"block_size": info.get("block_size", 0), "num_gpu_blocks": info.get("num_blocks", 0)}
            cache.add_metric(_labels(served), {name: str(value) for name, value in shown.items()})
        yield backend
        yield cache

    def _by_kind(self) -> Iterator[Metric]:
        """Figures with a label of their own."""
        reasons = CounterMetricFamily(
            PREFIX + "request_success", "ended requests", labels=[*_LABELS, "finished_reason"]
        )
        blocks = GaugeMetricFamily(PREFIX + "kv_cache_blocks", "cache blocks", labels=[*_LABELS, "state"])
        bound = GaugeMetricFamily(
            PREFIX + "bottleneck",
            "1 for what binds the engine, over the last 10 s",
            labels=[*_LABELS, "bound"],
        )
        shares = GaugeMetricFamily(
            PREFIX + "bottleneck_share", "share of the last 10 s by what bound", labels=[*_LABELS, "bound"]
        )
        lanes = GaugeMetricFamily(
            PREFIX + "lane_requests", "requests by lane of prompt lengths", labels=[*_LABELS, "lane", "state"]
        )
        for served in self._server.models:
            labels, stats, binding = _labels(served), served.client.last_stats, served.watch.binding()
            for reason, count in served.times.finished.items():
                reasons.add_metric([*labels, reason], count)
            for state in ("free", "held", "cached"):
                blocks.add_metric([*labels, state], stats.get(f"blocks_{state}", 0))
            for name in BOUNDS:
                bound.add_metric([*labels, name], float(name == binding.bound))
                shares.add_metric([*labels, name], binding.shares[name])
            for lane in ("short", "long"):
                for state in ("running", "waiting"):
                    lanes.add_metric([*labels, lane, state], _in_lane(stats, lane, state))
        yield from (reasons, blocks, bound, shares, lanes)
        yield from self._by_position()

    def _by_position(self) -> Iterator[Metric]:
        """Right guesses of speculative decoding by their place; no series where there were no guesses."""
        labels = [*_LABELS, "position"]
        name = PREFIX + "spec_decode_"
        counts = CounterMetricFamily(
            name + "num_accepted_tokens_per_pos", "guesses that were right", labels=labels
        )
        rates = GaugeMetricFamily(
            name + "per_position_accept_rate", "the same as a share of the steps with guesses", labels=labels
        )
        for served in self._server.models:
            for position, count in enumerate(served.times.accepted):
                counts.add_metric([*_labels(served), str(position)], count)
                rates.add_metric([*_labels(served), str(position)], _share(count, served.times.drafts))
        yield from (counts, rates)

    def _http(self) -> Iterator[Metric]:
        server = self._server
        answers = CounterMetricFamily(
            PREFIX + "http_requests",
            "answers; route is empty for unknown paths, status 0 where the client left first",
            labels=["method", "route", "status"],
        )
        for (method, route, status), count in server.answers.items():
            answers.add_metric([method, route, str(status)], count)
        yield answers
        yield GaugeMetricFamily(
            PREFIX + "http_requests_active", "POST requests being answered", server.active
        )
        yield GaugeMetricFamily(PREFIX + "http_body_bytes", "bytes of request bodies held", server.body_bytes)
        yield GaugeMetricFamily(
            PREFIX + "server_resident_memory_bytes", "memory of the web server in RAM", resident_bytes()
        )


def _in_lane(stats: Mapping[str, Any], lane: str, state: str) -> float:
    long = float(stats.get(f"long_{state}", 0))
    return long if lane == "long" else float(stats.get(state, 0)) - long


def _labels(served: Served) -> tuple[str, str]:
    """`engine` numbers the engines of a model; there is one."""
    return served.ids[0], "0"


async def metrics(server: Server) -> Response:
    """The text of GET /metrics."""
    await asyncio.gather(*(ask(served) for served in server.models))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(server))
    return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})


async def ask(served: Served) -> None:
    """Take the engine's figures anew, unless it does not answer in time."""
    with contextlib.suppress(EngineDeadError, asyncio.TimeoutError):
        if served.client.ready:
            served.watch.add(await asyncio.wait_for(served.client.stats(), _PATIENCE))
