"""The proxy before scripted servers: what passes unchanged, what is sent again, what is told at last."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from proxy_nodes import (
    EVENTS,
    JSON,
    FakeNode,
    answer,
    begin_stream,
    behind,
    break_off,
    chunk,
    hang,
    plain,
    stream,
)
from proxy_nodes import Seen as Request
from serve_wire import error_of


async def test_an_answer_passes_unchanged() -> None:
    async def teapot(seen: Request, writer: asyncio.StreamWriter) -> None:
        await answer(writer, b'{"a":  1}', "418 I'm a teapot", retry_after="7", x_mine="yes")

    async with behind(FakeNode(teapot)) as proxy:
        raw = b'{"model": "m",   "n": 1e400}'
        headers = {"authorization": "Bearer k", "x-request-id": "mine", "content-type": "application/json"}
        response = await proxy.http.post("/v1/chat/completions?a=b", content=raw, headers=headers)
        assert (response.status_code, response.content) == (418, b'{"a":  1}')
        assert (response.headers["retry-after"], response.headers["x-mine"]) == ("7", "yes")
        assert response.headers["x-request-id"] == "mine"
        (seen,) = proxy.nodes[0].seen
        assert (seen.method, seen.target, seen.body) == ("POST", "/v1/chat/completions?a=b", raw)
        assert (seen.headers["authorization"], seen.headers["x-request-id"]) == ("Bearer k", "mine")
        assert seen.headers["host"] == proxy.nodes[0].url.removeprefix("http://")


async def test_a_stream_passes_unchanged() -> None:
    async with behind(FakeNode(stream)) as proxy:
        response = await proxy.post(model="m", stream=True)
        assert response.content == b"".join(EVENTS)
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"


async def test_connections_are_used_again() -> None:
    async with behind(FakeNode(plain)) as proxy:
        for _ in range(5):
            assert (await proxy.post(model="m")).content == JSON
        assert proxy.nodes[0].connections == 1


async def test_a_closed_connection_is_no_failure() -> None:
    """The server has closed it while it was unused, and the proxy finds out by writing to it."""

    async with behind(FakeNode(plain)) as proxy:
        await proxy.post(model="m")
        for writer in proxy.nodes[0].writers:
            writer.close()
        assert (await proxy.post(model="m")).status_code == 200
        assert [node.failed for node in proxy.proxy.nodes] == [0]


@pytest.mark.parametrize("broken", [break_off, None], ids=["breaks off", "is gone"])
async def test_another_node_answers_for_a_lost_one(broken: object) -> None:
    nodes = [FakeNode(break_off), FakeNode(plain), FakeNode(plain)]
    async with behind(*nodes) as proxy:
        if broken is None:
            await nodes[0].kill()
        for _ in range(12):
            assert (await proxy.post(model="m")).content == JSON


async def test_half_an_answer_is_asked_for_again() -> None:
    async def half(seen: Request, writer: asyncio.StreamWriter) -> None:
        await answer(writer, JSON[:5], content_length="100")
        writer.transport.abort()

    async with behind(FakeNode(half), FakeNode(plain)) as proxy:
        for _ in range(6):
            response = await proxy.post(model="m")
            assert (response.status_code, response.content) == (200, JSON)


async def silent_then_gone(seen: Request, writer: asyncio.StreamWriter) -> None:
    await begin_stream(writer)
    await chunk(writer, b": keep-alive\n\n")
    await asyncio.sleep(0.01)
    writer.transport.abort()


async def test_a_stream_that_said_nothing_goes_on_elsewhere() -> None:
    """Comments keep the client waiting; they are no part of an answer."""
    async with behind(FakeNode(silent_then_gone), FakeNode(stream)) as proxy:
        for _ in range(6):
            response = await proxy.post(model="m", stream=True)
            assert response.content.replace(b": keep-alive\n\n", b"") == b"".join(EVENTS)
        assert proxy.asked()[0] > 0


async def test_a_silent_stream_that_is_refused_elsewhere_ends_with_the_refusal() -> None:
    async def refuse(seen: Request, writer: asyncio.StreamWriter) -> None:
        await answer(
            writer, b'{"error":{"message":"no room","type":"t","param":null,"code":null}}', "400 Bad"
        )

    async with behind(FakeNode(silent_then_gone), FakeNode(refuse)) as proxy:
        bodies = [(await proxy.post(model="m", stream=True)) for _ in range(8)]
        streams = [body.text for body in bodies if body.status_code == 200]
        assert streams
        for text in streams:
            comment, error, done, rest = text.split("\n\n")
            assert (comment, done, rest) == (": keep-alive", "data: [DONE]", "")
            assert json.loads(error.removeprefix("data: "))["error"]["message"] == "no room"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_a_stream_that_broke_off_ends_with_an_error(path: str) -> None:
    """Only whole events, then the error in the words of the route."""

    async def broken(seen: Request, writer: asyncio.StreamWriter) -> None:
        await begin_stream(writer)
        await chunk(writer, EVENTS[0] + EVENTS[1][:6])
        await asyncio.sleep(0.01)
        writer.transport.abort()

    async with behind(FakeNode(broken), FakeNode(broken)) as proxy:
        response = await proxy.post(path, model="m", stream=True)
        assert response.status_code == 200
        events = response.text.split("\n\n")
        assert events[0] == EVENTS[0].decode().strip()
        name, _, data = events[1].rpartition("data: ")
        error = json.loads(data)
        if path == "/v1/chat/completions":
            assert (error["error"]["code"], events[2]) == ("service_unavailable", "data: [DONE]")
        else:
            assert (name, error["type"], events[2:]) == ("event: error\n", "error", [""])
        assert sum(proxy.asked()) == 1


async def test_a_node_that_takes_none_is_passed_over_until_it_is_well() -> None:
    async def unready(seen: Request, writer: asyncio.StreamWriter) -> None:
        await answer(writer, b'{"error":"draining"}', "503 Service Unavailable", retry_after="1")

    nodes = [FakeNode(unready), FakeNode(plain)]
    async with behind(*nodes) as proxy:
        for _ in range(10):
            assert (await proxy.post(model="m")).status_code == 200
        assert proxy.asked() == [1, 10] or proxy.asked() == [0, 10]
        nodes[0].script = plain
        await proxy.probe()
        for _ in range(10):
            await proxy.post(model="m")
        assert proxy.asked()[0] > 1


async def test_the_refusal_of_the_last_node_passes_unchanged() -> None:
    async def unready(seen: Request, writer: asyncio.StreamWriter) -> None:
        await answer(writer, b'{"mine":true}', "503 Service Unavailable", retry_after="9")

    async with behind(FakeNode(unready), FakeNode(unready)) as proxy:
        response = await proxy.post(model="m")
        assert (response.status_code, response.content) == (503, b'{"mine":true}')
        assert response.headers["retry-after"] == "9"


async def test_one_request_does_not_bring_down_every_server() -> None:
    async with behind(*(FakeNode(break_off) for _ in range(6))) as proxy:
        error = error_of(await proxy.post(model="m"), 503, "server_error")
        assert error["code"] == "service_unavailable"
        assert sum(count > 0 for count in proxy.asked()) == 3


async def test_models_decide_who_may_answer() -> None:
    nodes = [FakeNode(models=("a", "b")), FakeNode(models=("b",))]
    async with behind(*nodes) as proxy:
        for _ in range(4):
            await proxy.post(model="a")
        await proxy.post(model="/models/a")
        assert proxy.asked() == [5, 0]
        ids = [card["id"] for card in (await proxy.http.get("/v1/models")).json()["data"]]
        assert ids == ["a", "b"]
        assert (await proxy.http.get("/v1/models/a")).json()["id"] == "a"
        assert error_of(await proxy.http.get("/v1/models/c"), 404)["code"] == "model_not_found"
        missing = error_of(await proxy.post(model="c"), 404)
        assert (missing["code"], missing["param"]) == ("model_not_found", "model")
        await nodes[0].kill()
        await proxy.probe()
        error_of(await proxy.post(model="a"), 503, "server_error")


async def test_a_client_that_leaves_is_left_by_the_proxy() -> None:
    node = FakeNode(hang)
    async with behind(node) as proxy:
        task = asyncio.ensure_future(proxy.post(model="m"))
        while not node.seen:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait_for(node.closed.wait(), 2)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (proxy.proxy.active, proxy.proxy.body_bytes) == (0, 0)
        assert [one.unfinished for one in proxy.proxy.nodes] == [0]


async def test_a_server_that_stops_answering_loses_its_requests_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a process that is stopped, whose connections stay open."""
    monkeypatch.setattr("lmdeploy.serve.proxy.health.PROBE_SECONDS", 0.05)
    nodes = [FakeNode(hang), FakeNode(plain)]
    async with behind(*nodes) as proxy:
        tasks = [asyncio.ensure_future(proxy.post(model="m")) for _ in range(8)]
        while not nodes[0].seen:
            await asyncio.sleep(0.01)
        nodes[0].frozen = True
        for _ in range(3):
            await proxy.probe()
        assert {(await task).status_code for task in tasks} == {200}


async def test_nodes_come_and_go() -> None:
    late = FakeNode(plain, models=("late",))
    await late.start()
    async with behind() as proxy:
        error_of(await proxy.post(model="late"), 503, "server_error")
        assert (await proxy.http.get("/health")).status_code == 503
        added = await proxy.http.post("/nodes/add", json={"url": late.url + "/", "status": {"speed": 3}})
        assert added.status_code == 200
        assert (await proxy.post(model="late")).status_code == 200
        (status,) = (await proxy.http.get("/nodes/status")).json().items()
        assert status[0] == late.url
        assert (status[1]["models"], status[1]["speed"], status[1]["health"]) == (["late"], 3, "ready")
        assert (await proxy.http.get("/health")).json()["nodes"] == {"ready": 1}
        assert (await proxy.http.post("/nodes/remove", json={"url": late.url})).status_code == 200
        error_of(await proxy.http.post("/nodes/remove", json={"url": late.url}), 404)
        await proxy.http.post("/nodes/add", json={"url": late.url})
        assert (await proxy.http.post(f"/nodes/remove?node_url={late.url}")).status_code == 200
        error_of(await proxy.post(model="late"), 503, "server_error")
    await late.kill()


BAD_NODES = [
    (b"{", 400),
    (b"[]", 400),
    (b"{}", 400),
    (b'{"url": 3}', 400),
    (b'{"url": "ftp://x"}', 400),
    (b'{"url": "http://"}', 400),
    (b'{"url": "http://a b"}', 400),
    (b'{"url": "http://a:99999999"}', 400),
    (b'{"url": "http://u:p@a"}', 400),
    (b'{"url": "http://a?x=y"}', 400),
    (b'{"url": "http://\\u0000"}', 400),
    (b'{"url": "http://a", "status": {"speed": 0}}', 400),
    (b'{"url": "http://a", "status": {"speed": "x"}}', 400),
    (b'{"url": "http://a", "status": {"models": "x"}}', 400),
    (b'{"url": "http://a", "status": {"role": "Prefill"}}', 400),
    (b"\xff", 400),
    (b"[" * 100000, 400),
    (b" " * (2 << 20), 413),
]


@pytest.mark.parametrize(("raw", "status"), BAD_NODES, ids=lambda x: repr(x)[:40])
async def test_bad_bodies_of_node_routes(raw: bytes, status: int) -> None:
    async with behind() as proxy:
        for path in ("/nodes/add", "/nodes/remove", "/nodes/terminate"):
            response = await proxy.http.post(path, content=raw)
            # A text that could be no URL is no known node either.
            error_of(response, 404 if path != "/nodes/add" and response.status_code == 404 else status)
        assert len(proxy.proxy.nodes) == 0


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b'{"model": 3}', b'{"model": null}', b"\xff\xfe", b"[" * 200000, b'"x"', b"NaN"]
)
async def test_bodies_that_say_nothing_go_to_any_node(raw: bytes) -> None:
    """What is wrong with them is for the server to say."""
    async with behind(FakeNode(plain)) as proxy:
        assert (await proxy.http.post("/v1/completions", content=raw)).status_code == 200
        assert proxy.nodes[0].seen[0].body == raw


async def test_keys() -> None:
    async with behind(FakeNode(plain), keys=("k",), node_key="inner") as proxy:
        for path in ("/v1/chat/completions", "/nodes/add"):
            error_of(await proxy.http.post(path, json={}), 401)
        for path in ("/nodes/status", "/v1/models"):
            error_of(await proxy.http.get(path), 401)
        assert (await proxy.http.get("/health")).status_code == 200
        proxy.http.headers["authorization"] = "Bearer k"
        proxy.http.headers["x-api-key"] = "k"
        assert (await proxy.post(model="m")).status_code == 200
        headers = proxy.nodes[0].seen[0].headers
        assert headers["authorization"] == "Bearer inner"
        assert "x-api-key" not in headers


async def test_unknown_routes_and_methods() -> None:
    async with behind(FakeNode(plain)) as proxy:
        error_of(await proxy.http.get("/nope"), 404)
        error_of(await proxy.http.get("/v1/chat/completions"), 405)
        error_of(await proxy.http.post("/sleep"), 404)
        error_of(await proxy.http.post("/distserve/gc"), 501)
        assert (await proxy.http.head("/v1/models")).status_code == 200
        assert (await proxy.http.post("/v1/completions/", json={})).status_code == 200


async def test_large_bodies_are_refused() -> None:
    async with behind(FakeNode(plain), max_body=1000, max_bodies=1500) as proxy:
        assert error_of(await proxy.http.post("/v1/completions", content=b"x" * 1001), 413)
        assert proxy.proxy.body_bytes == 0


async def test_draining() -> None:
    async with behind(FakeNode(plain)) as proxy:
        proxy.proxy.draining = True
        error_of(await proxy.post(model="m"), 503, "server_error")
        assert (await proxy.http.get("/health")).status_code == 503


async def test_terminate_asks_the_server() -> None:
    node = FakeNode(plain)
    async with behind(node) as proxy:
        await proxy.http.get("/nodes/terminate_all")
        assert node.seen[0].target == "/terminate"
        assert len(proxy.proxy.nodes) == 0

    async def refuse(seen: Request, writer: asyncio.StreamWriter) -> None:
        await answer(writer, b"{}", "404 Not Found")

    async with behind(FakeNode(refuse)) as proxy:
        for request in (
            httpx.Request("GET", "http://proxy/nodes/terminate_all"),
            httpx.Request("POST", "http://proxy/nodes/terminate", json={"url": proxy.nodes[0].url}),
        ):
            error_of(await proxy.http.send(request), 502)
        assert len(proxy.proxy.nodes) == 1


async def test_metrics_are_summed() -> None:
    text = "# TYPE lmdeploy:x_total counter\nlmdeploy:x_total 2\n"
    nodes = [FakeNode(plain, metrics=text), FakeNode(plain, metrics=text), FakeNode(break_off, metrics=text)]
    async with behind(*nodes) as proxy:
        for _ in range(9):
            await proxy.post(model="m")
        await nodes[1].kill()
        found = await proxy.http.get("/metrics")
        assert found.headers["content-type"].startswith("text/plain")
        values = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(found.text)
            for sample in family.samples
        }
        assert values["lmdeploy:x_total",] == 4
        retries = values["lmdeploy:proxy_retries_total",]
        assert retries > 0
        assert values["lmdeploy:proxy_requests_failed_total", nodes[2].url] == retries
        answered = [values["lmdeploy:proxy_requests_answered_total", node.url] for node in nodes]
        assert (sum(answered), answered[2]) == (9, 0)
        assert values["lmdeploy:proxy_nodes", "ready"] == 3
        assert (await proxy.http.head("/metrics")).status_code == 200
