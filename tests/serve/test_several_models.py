"""Several models behind one server: names, health, and a death that is only its own."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from byte_model import make_frontend
from serve_fakes import Api, engine_client
from serve_metrics import scrape
from serve_wire import error_of

from lmdeploy.serve.served import SAMPLING_DEFAULTS, Served, Server

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pair() -> AsyncIterator[Api]:
    """Model `one` answers "first", `two` answers "second"."""
    async with engine_client(script="first$") as one, engine_client(script="second$") as two:
        models = tuple(
            Served(
                make_frontend(512, defaults=SAMPLING_DEFAULTS), client, "same/path", (name,), by_path=False
            )
            for name, client in (("one", one), ("two", two))
        )
        yield Api(Server(models))


async def text_of(pair: Api, **fields: str) -> str:
    answer = await pair.chat("x", **fields)
    return str(answer.json()["choices"][0]["message"]["content"])


async def test_model_routes_and_the_list_has_all(pair: Api) -> None:
    listed = (await pair.http.get("/v1/models")).json()["data"]
    assert [entry["id"] for entry in listed] == ["one", "two"]
    assert [await text_of(pair, model=name) for name in ("one", "two", "one")] == ["first", "second", "first"]
    assert await text_of(pair) == "first"
    assert (await pair.http.get("/v1/models/two")).json()["id"] == "two"
    error = error_of(await pair.chat("x", model="three"), 404)
    assert "`one`, `two`" in error["message"]


async def test_health_waits_until_all_were_loaded(pair: Api) -> None:
    assert (await pair.http.get("/health")).status_code == 200
    pair.server.loading = True
    assert (await pair.http.get("/health")).status_code == 503
    pair.server.loading = False


async def test_figures_are_kept_apart(pair: Api) -> None:
    before = await scrape(pair)
    await text_of(pair, model="two")
    after = await scrape(pair)
    for name, more in (("one", 0), ("two", 7)):
        counter = "generation_tokens_total"
        assert after(counter, model_name=name) - before(counter, model_name=name) == more


async def test_a_dead_one_is_started_again_alone(pair: Api) -> None:
    one, two = (served.client for served in pair.server.models)
    others = two.pid
    waits = asyncio.ensure_future(pair.chat("x", model="two", max_tokens=200, ignore_eos=True))
    os.kill(one.pid or 0, signal.SIGKILL)
    for _ in range(200):
        health = await pair.http.get("/health")
        assert health.status_code == 200
        if health.json()["models"] == {"one": "starting", "two": "ready"}:
            break
        await asyncio.sleep(0.005)
    else:
        raise AssertionError("the death was not seen")
    assert (await pair.http.get("/health?model=one")).status_code == 503
    assert (await pair.http.get("/health?model=two")).status_code == 200
    assert await text_of(pair, model="two") == "second"
    assert (await waits).status_code == 200
    assert await text_of(pair, model="one") == "first", "it waits until the engine is there again"
    assert (one.restarts, two.restarts, two.pid) == (1, 0, others)
