"""What /metrics says, against what was done; read by the parser of the Prometheus client."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from serve_fakes import TEXT, Api, api, request
from serve_metrics import dashboard_queries, scrape

from lmdeploy.serve import binding, monitor

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server() -> AsyncIterator[Api]:
    async with api(TEXT, step_seconds=0.003, num_blocks=512) as server:
        yield server


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
    assert sum(blocks.values()) == 512
    assert seen("num_requests_running") == 1
    assert blocks["held"] > 0
    assert seen("gpu_cache_usage_perc") == blocks["held"] / 512
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


async def test_too_few_rows_bind_and_the_log_says_so(
    server: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(monitor, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(monitor, "WINDOW", 0.5)
    monkeypatch.setattr(binding, "WINDOW", 0.5)
    caplog.set_level("INFO", "lmdeploy.serve")
    stream = await server.served.client.submit(*(request(f"row{i}", f"{i}", 400) for i in range(12)))
    watching = asyncio.ensure_future(monitor.Monitor(server.server).run())
    await asyncio.sleep(0.75)
    seen = await scrape(server)
    watching.cancel()
    stream.abort()
    assert (seen("num_requests_running"), seen("num_requests_waiting")) == (8, 4)
    assert seen("bottleneck", bound="max_batch_size") == 1
    assert seen("bottleneck_share", bound="max_batch_size") > 0.9
    assert seen("engine_utilisation") > 0.9
    lines = [record.getMessage() for record in caplog.records if "bound by" in record.getMessage()]
    assert lines
    assert "running 8, waiting 4" in lines[-1]
    assert "bound by max_batch_size" in lines[-1]


async def test_head_and_the_switch(server: Api) -> None:
    assert (await server.http.head("/metrics")).status_code == 200
    off = server.configure(metrics=False)
    assert (await off.http.get("/metrics")).status_code == 404


async def test_metrics_need_the_key_where_there_are_keys(server: Api) -> None:
    closed = server.configure(api_keys=("secret",))
    assert (await closed.http.get("/metrics")).status_code == 401
    answer = await closed.http.get("/metrics", headers={"Authorization": "Bearer secret"})
    assert answer.status_code == 200


# What dashboards made for LMDeploy ask for.
KNOWN = """
num_requests_succeeded num_requests_failed num_api_requests_routed num_api_requests_waiting
num_requests_running num_requests_waiting gpu_cache_usage_perc prefix_cache_hit_rate
spec_decode_mean_accept_rate spec_decode_mean_accept_length spec_decode_per_position_accept_rate
prompt_tokens_total generation_tokens_total cached_tokens_total request_success_total
spec_decode_num_drafts_total spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total
spec_decode_num_accepted_tokens_per_pos_total request_prompt_tokens_bucket
request_generation_tokens_bucket request_cached_tokens_bucket request_cache_hit_ratio_bucket
iteration_tokens_total_bucket time_to_first_token_seconds_bucket time_per_output_token_seconds_bucket
iter_token_latency_bucket e2e_request_latency_seconds_bucket request_queue_time_seconds_bucket
request_inference_time_seconds_bucket request_prefill_time_seconds_bucket
request_decode_time_seconds_bucket backend_config_info
"""


async def test_guesses_are_counted_by_their_place() -> None:
    async with api("ab ab ab ab ab ab ab ab ab$", lookup=True) as server:
        usage = (await server.chat("ab ab ab ab")).json()["usage"]["completion_tokens_details"]
        seen = await scrape(server)
    right, wrong = usage["accepted_prediction_tokens"], usage["rejected_prediction_tokens"]
    assert right > 0
    assert seen("spec_decode_num_accepted_tokens_total") == right
    assert seen("spec_decode_num_draft_tokens_total") == right + wrong
    drafts = seen("spec_decode_num_drafts_total")
    assert seen("spec_decode_mean_accept_length") == 1 + right / drafts
    places = [s.value for s in seen.samples if s.name.endswith("accepted_tokens_per_pos_total")]
    assert sum(places) == right
    assert places == sorted(places, reverse=True)
    first = seen("spec_decode_per_position_accept_rate", position="0")
    assert first == places[0] / drafts
    assert {f"lmdeploy:{name}" for name in KNOWN.split()} <= seen.names


async def test_every_metric_of_the_dashboard_is_there(server: Api) -> None:
    await server.chat()
    names = {name for query in dashboard_queries() for name in re.findall(r"lmdeploy:\w+", query)}
    assert len(names) > 20
    assert names <= (await scrape(server)).names
