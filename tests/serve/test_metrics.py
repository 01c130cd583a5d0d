"""What /metrics says, against what was done; read by the parser of the Prometheus client."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families
from serve_fakes import TEXT, Api, api, request

DASHBOARD = Path(__file__).resolve().parents[2] / "docs/dashboard/lmdeploy.json"

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server() -> AsyncIterator[Api]:
    async with api(TEXT, step_seconds=0.002) as server:
        yield server


class Scrape:
    """One answer of /metrics."""

    def __init__(self, text: str) -> None:
        families = text_string_to_metric_families(text)
        self.samples = [sample for family in families for sample in family.samples]
        self.names = {sample.name for sample in self.samples}

    def __call__(self, name: str, **labels: str) -> float:
        found = [
            s.value
            for s in self.samples
            if s.name == f"lmdeploy:{name}" and labels.items() <= s.labels.items()
        ]
        assert len(found) == 1, f"{name}{labels}: {len(found)} samples"
        return found[0]


async def scrape(server: Api) -> Scrape:
    answer = await server.http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return Scrape(answer.text)


async def test_tokens_and_requests_are_those_of_the_answers(server: Api) -> None:
    before = await scrape(server)
    answers = await asyncio.gather(*(server.chat(f"question {i}") for i in range(5)))
    usage = [a.json()["usage"] for a in answers]
    after = await scrape(server)

    def grown(name: str, **labels: str) -> float:
        return after(name, **labels) - before(name, **labels)

    assert grown("prompt_tokens_total") == sum(u["prompt_tokens"] for u in usage)
    assert grown("generation_tokens_total") == sum(u["completion_tokens"] for u in usage)
    cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in usage)
    assert grown("cached_tokens_total") == cached
    assert grown("request_success_total", finished_reason="stop") == 5
    assert grown("num_requests_succeeded") == 5
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert grown(name + "_count") == 5
    assert grown("iter_token_latency_count") == sum(u["completion_tokens"] - 1 for u in usage)
    assert grown("engine_compute_seconds_total") > 0
    assert (after("num_requests_running"), after("num_requests_waiting")) == (0, 0)


async def test_a_stop_string_ends_in_success_and_a_closed_stream_in_abort(server: Api) -> None:
    before = await scrape(server)
    assert (await server.chat(stop=["wör"])).json()["choices"][0]["finish_reason"] == "stop"
    stream = await server.served.client.submit(request("left", "x" * 20, 400))
    await anext(stream)
    stream.abort()
    after = await scrape(server)
    for reason, more in (("stop", 1), ("abort", 1), ("error", 0)):
        labels = {"finished_reason": reason}
        assert after("request_success_total", **labels) - before("request_success_total", **labels) == more


async def test_blocks_add_up_and_waste_is_what_blocks_hold_beyond_tokens(server: Api) -> None:
    task = asyncio.ensure_future(server.chat("x" * 40, ignore_eos=True, max_tokens=200))
    await asyncio.sleep(0.2)
    seen = await scrape(server)
    await task
    blocks = {state: seen("kv_cache_blocks", state=state) for state in ("free", "held", "cached")}
    assert sum(blocks.values()) == 128
    assert seen("num_requests_running") == 1
    assert blocks["held"] > 0
    assert seen("gpu_cache_usage_perc") == blocks["held"] / 128
    assert 0 <= seen("kv_cache_waste_tokens") < 16  # the rest of its last block
    assert seen("kv_cache_waste_perc") == seen("kv_cache_waste_tokens") / (16 * blocks["held"])


async def test_answers_are_counted_by_route_and_status(server: Api) -> None:
    await server.http.get("/no/such/route")
    await server.chat(temperature=3)
    await server.http.get("/v1/models/byte-model")
    seen = await scrape(server)
    assert seen("http_requests_total", route="", status="404") >= 1
    assert seen("http_requests_total", route="/v1/chat/completions", status="400", method="POST") == 1
    assert seen("http_requests_total", route="/v1/models/{name:path}", status="200") == 1


async def test_head_and_the_switch(server: Api) -> None:
    assert (await server.http.head("/metrics")).status_code == 200
    off = server.configure(metrics=False)
    assert (await off.http.get("/metrics")).status_code == 404


async def test_metrics_need_the_key_where_there_are_keys(server: Api) -> None:
    closed = server.configure(api_keys=("secret",))
    assert (await closed.http.get("/metrics")).status_code == 401
    answer = await closed.http.get("/metrics", headers={"Authorization": "Bearer secret"})
    assert answer.status_code == 200


def dashboard_names() -> set[str]:
    """Every metric that a panel of the dashboard asks for."""
    queries: list[str] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            queries.extend(v for k, v in value.items() if k in ("expr", "query") and isinstance(v, str))
            for item in value.values():
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)

    walk(json.loads(DASHBOARD.read_text()))
    return {name for query in queries for name in re.findall(r"lmdeploy:\w+", query)}


async def test_every_metric_of_the_dashboard_is_there(server: Api) -> None:
    await server.chat()
    names = dashboard_names()
    assert len(names) > 20
    assert names <= (await scrape(server)).names
