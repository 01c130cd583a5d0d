"""The access log and traces: what a request leaves behind, and what it must not."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from serve_fakes import ANSWER, Api
from serve_process import chat, running
from serve_wire import USAGE

from lmdeploy.errors import ConfigError
from lmdeploy.serve.access_log import AccessLog
from lmdeploy.serve.served import Report, ServerOptions
from lmdeploy.serve.tracing import Tracing

pytestmark = pytest.mark.asyncio(loop_scope="module")


def reporting(server: Api, *reports: Report, **served: Any) -> Api:
    """The same engine behind a server that reports."""
    own = replace(server.served, **served)
    return Api(replace(server.server, models=(own,), reports=reports, options=ServerOptions()))


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


async def test_a_line_for_each_request(server: Api, tmp_path: Path) -> None:
    file = tmp_path / "access.log"
    api = reporting(server, AccessLog(str(file)))
    answer = await api.http.post(
        "/v1/chat/completions", json=chat("tell me", n=2, max_tokens=6), headers={"x-request-id": "mine"}
    )
    stream = await api.chat("tell me more", **USAGE)
    await api.chat("x", temperature=9)
    await api.http.get("/health/")
    one, two, three, four = lines(file)

    assert one["request_id"] == "mine"
    assert (one["method"], one["path"], one["status"]) == ("POST", "/v1/chat/completions", 200)
    assert one["bytes"] == len(answer.content)
    assert one["reply_id"] == answer.json()["id"]
    usage = answer.json()["usage"]
    assert [a["end"] for a in one["answers"]] == ["length", "length"]
    assert sum(a["completion_tokens"] for a in one["answers"]) == usage["completion_tokens"]
    assert {a["prompt_tokens"] for a in one["answers"]} == {usage["prompt_tokens"]}
    for entry in one["answers"]:
        assert 0 <= entry["queue_ms"] <= entry["ttft_ms"] <= entry["ms"] <= one["ms"]

    assert two["bytes"] == len(stream.content)
    assert [a["end"] for a in two["answers"]] == ["stop"]
    assert (three["status"], three["error"]) == (400, "invalid_value")
    assert "answers" not in three
    assert (four["path"], four["status"]) == ("/health/", 200)
    assert len({line["request_id"] for line in lines(file)}) == 4


async def test_no_word_of_prompts_or_answers_unless_asked(server: Api, tmp_path: Path) -> None:
    files = tmp_path / "quiet", tmp_path / "open"
    for file, asked in zip(files, (False, True), strict=True):
        api = reporting(server, AccessLog(str(file)), log_prompts=asked, log_len=60)
        await api.chat("classified words")
        await api.complete("classified", stop=["classified"])
    quiet, shown = (file.read_text() for file in files)
    assert "classified" not in quiet
    assert ANSWER[:5] not in quiet + shown
    assert [("classified" in line["prompt"], len(line["prompt"]) <= 60) for line in lines(files[1])] == [
        (True, True)
    ] * 2


async def test_text_of_a_client_cannot_forge_a_line(server: Api, tmp_path: Path) -> None:
    file = tmp_path / "access.log"
    api = reporting(server, AccessLog(str(file)))
    await api.http.get('/v1/models/a%0A{"time":"x"}')
    await api.http.get("/v1/models", headers={"x-request-id": "a\tb"})
    assert len(lines(file)) == 2
    assert "\t" not in lines(file)[1]["request_id"]


async def test_the_engine_knows_a_request_by_the_clients_id(server: Api) -> None:
    seen: list[str] = []

    class Spy:
        def submitted(self, requests: Any) -> None:
            seen.extend(request.request_id for request in requests)

        def stepped(self, step: Any) -> None: ...

        def ended(self, request_ids: Any, error: Any, complete: bool = False) -> None: ...

    before, server.served.client.observer = server.served.client.observer, Spy()
    try:
        for _ in range(2):
            await server.http.post(
                "/v1/chat/completions", json=chat("x", max_tokens=2), headers={"x-request-id": "abc"}
            )
    finally:
        server.served.client.observer = before
    assert all(name.startswith("abc-") for name in seen)
    assert len(set(seen)) == 2, "unique also where clients repeat theirs"


async def test_a_moved_file_is_left_alone(tmp_path: Path, server: Api) -> None:
    file, moved = tmp_path / "access.log", tmp_path / "access.log.1"
    log = AccessLog(str(file))
    api = reporting(server, log)
    await api.http.get("/version")
    file.rename(moved)
    await api.http.get("/version")
    log.reopen()
    await api.http.get("/version")
    assert (len(lines(moved)), len(lines(file))) == (2, 1)


async def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--access-log .*: No such file or directory"):
        AccessLog(str(tmp_path / "no" / "log"))


async def test_a_full_disk_costs_no_request(server: Api, caplog: pytest.LogCaptureFixture) -> None:
    api = reporting(server, AccessLog("/dev/full"))
    for _ in range(2):
        assert (await api.chat("x", max_tokens=2)).status_code == 200
    assert caplog.text.count("the access log cannot be written: No space left on device") == 1


async def test_clients_that_leave(tmp_path: Path) -> None:
    file = tmp_path / "access.log"
    with running(step_seconds=0.01, access_log=str(file)) as server:
        body = chat("x", stream=True)
        async with server.http() as http, http.stream("POST", "/v1/chat/completions", json=body) as answer:
            await anext(answer.aiter_bytes())
    (line,) = lines(file)
    assert line["left"] is True
    assert line["status"] == 200
    assert [a["end"] for a in line["answers"]] == ["abort"]


async def test_traces_have_the_stations_of_each_answer(server: Api) -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept = InMemorySpanExporter()
    tracing = Tracing("http://localhost:1/v1/traces", kept)
    api = reporting(server, tracing)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    answer = await api.http.post(
        "/v1/chat/completions", json=chat("x", max_tokens=4), headers={"traceparent": parent}
    )
    await api.http.get("/health")
    tracing.close()
    spans = {span.name: span for span in kept.get_finished_spans()}
    assert set(spans) == {"POST /v1/chat/completions", "queue", "prefill", "decode"}
    whole = spans["POST /v1/chat/completions"]
    assert format(whole.context.trace_id, "032x") == "0af7651916cd43dd8448eb211c80319c"
    assert format(whole.parent.span_id, "016x") == "b7ad6b7169203331"
    assert whole.attributes["gen_ai.usage.output_tokens"] == 4
    assert whole.attributes["lmdeploy.request_id"] == answer.headers["x-request-id"]
    stations = [spans[name] for name in ("queue", "prefill", "decode")]
    assert all(span.parent.span_id == whole.context.span_id for span in stations)
    marks = [mark for span in stations for mark in (span.start_time, span.end_time)]
    assert marks == sorted(marks)
    assert whole.start_time <= marks[0] and marks[-1] <= whole.end_time


async def test_spans_arrive_at_a_collector(server: Api) -> None:
    """Over HTTP, as protocol buffers of OTLP."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        tracing = Tracing(f"http://127.0.0.1:{collector.server_port}/v1/traces")
        await reporting(server, tracing).chat("x", max_tokens=2)
        await asyncio.to_thread(tracing.close)
        collector.shutdown()
    (body,) = bodies
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    spans = [span.name for scope in resource.scope_spans for span in scope.spans]
    assert sorted(spans) == ["POST /v1/chat/completions", "decode", "prefill", "queue"]
