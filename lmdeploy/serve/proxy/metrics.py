"""GET /metrics: the metrics of all nodes as those of one server, and the proxy's own.

Owns how the values of several servers become one: numbers of things are added, shares and means are averaged.
The text format is `prometheus_client`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Sample
from starlette.requests import Request
from starlette.responses import Response

from lmdeploy.serve.proxy.forward import Proxy
from lmdeploy.serve.proxy.nodes import Health, Node
from lmdeploy.serve.proxy.upstream import Headers, UpstreamError

_ANSWER_SECONDS = 3.0
# Gauges of which the sum over servers means nothing.
_MEANS = ("_perc", "_rate", "_share", "_ratio", "_length", "_utilization", "_utilisation", "_seconds")
_Key = tuple[str, tuple[tuple[str, str], ...]]


async def metrics(proxy: Proxy, _: Request) -> Response:
    """A node that does not answer in time is left out this time."""
    asked = [node for node in proxy.nodes if node.health in (Health.READY, Health.NOT_READY)]
    texts = await asyncio.gather(*(_text(node, proxy.own_headers()) for node in asked))
    families = [*own_metrics(proxy), *summed([text for text in texts if text])]
    registry = CollectorRegistry()
    registry.register(_Families(families))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


class _Families(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


async def _text(node: Node, headers: Headers) -> str:
    async def read() -> str:
        async with await node.upstream.send("GET", "/metrics", headers) as answer:
            body = await answer.read()
        return body.decode(errors="replace") if answer.status == 200 else ""

    try:
        return await asyncio.wait_for(read(), _ANSWER_SECONDS)
    except (UpstreamError, asyncio.TimeoutError):
        return ""


def summed(texts: Sequence[str]) -> list[Metric]:
    """One family for each name in any of the texts; a text that cannot be read is left out."""
    families: dict[str, Metric] = {}
    values: dict[str, dict[_Key, list[float]]] = {}
    for text in texts:
        for family in _parsed(text):
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            of_family = values.setdefault(family.name, {})
            for sample in family.samples:
                key = sample.name, tuple(sorted(sample.labels.items()))
                of_family.setdefault(key, []).append(sample.value)
    for name, family in families.items():
        for (sample_name, labels), found in values[name].items():
            value = _one(family.type, sample_name, found)
            family.samples.append(Sample(sample_name, dict(labels), value))
    return list(families.values())


def _parsed(text: str) -> list[Metric]:
    try:
        return list(text_string_to_metric_families(text))
    except (ValueError, KeyError, IndexError):
        return []


def _one(kind: str, name: str, values: Sequence[float]) -> float:
    if name.endswith("_created"):  # when counting began
        return min(values)
    if name.endswith("_info") or kind == "info":
        return max(values)
    total = sum(values)
    return total / len(values) if kind == "gauge" and name.endswith(_MEANS) else total


def own_metrics(proxy: Proxy) -> Iterator[Metric]:
    """What the proxy knows itself."""
    nodes = list(proxy.nodes)
    states = GaugeMetricFamily("lmdeploy:proxy_nodes", "servers by state", labels=["state"])
    for health in Health:
        states.add_metric([health.value], sum(node.health is health for node in nodes))
    yield states
    unfinished = GaugeMetricFamily("lmdeploy:proxy_requests_unfinished", "held now", labels=["node"])
    answered = CounterMetricFamily("lmdeploy:proxy_requests_answered", "answered", labels=["node"])
    failed = CounterMetricFamily("lmdeploy:proxy_requests_failed", "not answered, or cut", labels=["node"])
    for node in nodes:
        unfinished.add_metric([node.url], node.unfinished)
        answered.add_metric([node.url], node.answered)
        failed.add_metric([node.url], node.failed)
    yield from (unfinished, answered, failed)
    retries = CounterMetricFamily("lmdeploy:proxy_retries", "requests sent to a further server")
    retries.add_metric([], proxy.retries)
    yield retries
