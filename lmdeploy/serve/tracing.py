"""Traces for OpenTelemetry: a span for each HTTP request, and below it the stations of its answers.

Needs the extra `otel`. Spans are made when a request has ended, from its record: nothing is done before.
Knows no route.
"""

from __future__ import annotations

from typing import Any

from lmdeploy import __version__
from lmdeploy.errors import ConfigError
from lmdeploy.serve.passage import Passage
from lmdeploy.serve.record import Record


class Tracing:
    """Sends spans to a collector that speaks OTLP over HTTP. Raises ConfigError without the extra.

    exporter: where spans go instead, in tests.
    """

    def __init__(self, endpoint: str, exporter: Any = None) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise ConfigError(
                "--otlp-traces-endpoint needs the extra `otel`: pip install 'lmdeploy[otel]'"
            ) from None
        resource = Resource.create({"service.name": "lmdeploy", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("lmdeploy.serve", __version__)

    def write(self, record: Record) -> None:
        """The spans of a request that has ended. Only those of routes that generate are worth it."""
        if not record.passages:
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        def at(seconds: float) -> int:
            """Nanoseconds of the wall clock for a time of the record's."""
            return int((record.at + seconds - record.began) * 1e9)

        above = TraceContextTextMapPropagator().extract({"traceparent": record.traceparent})
        span = self._tracer.start_span(
            f"{record.method} {record.route}",
            context=above,
            kind=SpanKind.SERVER,
            attributes=_attributes(record),
            start_time=at(record.began),
        )
        inside = set_span_in_context(span)
        end = record.began
        for passage in record.passages:
            for name, start, stop in _stations(passage):
                child = self._tracer.start_span(
                    name, context=inside, start_time=at(start), attributes={"lmdeploy.id": passage.request_id}
                )
                child.end(at(stop))
                end = max(end, stop)
        if record.status >= 500 or record.error:
            span.set_status(Status(StatusCode.ERROR, record.error))
        span.end(at(max(record.ended, end)))

    def reopen(self) -> None:
        """There is no file."""

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def _stations(passage: Passage) -> list[tuple[str, float, float]]:
    """(name, begin, end) of the stations that were reached."""
    ended = passage.ended or passage.last or passage.submitted
    marks = [("queue", passage.submitted), ("prefill", passage.started), ("decode", passage.first)]
    reached = [(name, begin) for name, begin in marks if begin]
    ends = [begin for _, begin in reached[1:]] + [ended]
    return [(name, begin, max(begin, end)) for (name, begin), end in zip(reached, ends, strict=True)]


def _attributes(record: Record) -> dict[str, Any]:
    """In the words of OpenTelemetry's conventions for HTTP and for generative models where they have one."""
    passages = record.passages
    firsts = [p.first - p.submitted for p in passages if p.first]
    return {
        "http.request.method": record.method,
        "http.route": record.route,
        "http.response.status_code": record.status,
        "url.path": record.path,
        "client.address": record.client,
        "gen_ai.request.model": record.model,
        "gen_ai.response.id": record.reply_id,
        "gen_ai.response.finish_reasons": [p.reason for p in passages],
        "gen_ai.usage.input_tokens": sum(p.prompt_tokens for p in passages),
        "gen_ai.usage.output_tokens": sum(p.generated for p in passages),
        "lmdeploy.request_id": record.request_id,
        "lmdeploy.cached_tokens": sum(p.cached_tokens for p in passages),
        "lmdeploy.time_to_first_token": min(firsts, default=0.0),
    }
