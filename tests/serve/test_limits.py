"""What one key may use in a minute, and how long an answer may take."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from serve_fakes import Api, api
from serve_wire import error_of

from lmdeploy.serve.limits import KeyLimitError, KeyLimits

HI = [{"role": "user", "content": "hi"}]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.floats(0, 90), max_size=60), st.integers(1, 20))
def test_never_more_than_the_limit_and_the_refill(steps: list[float], most: int) -> None:
    clock = Clock()
    limits = KeyLimits(requests=most, clock=clock)
    for admitted, wait in enumerate(steps, 1):
        clock.now += wait
        try:
            limits.admit("a")
        except KeyLimitError as error:
            clock.now += error.retry_after
            limits.admit("a")  # the time it names is enough
        assert admitted <= most + clock.now * most / 60 + 1e-6


def test_keys_do_not_share() -> None:
    limits = KeyLimits(requests=1, clock=Clock())
    limits.admit("a")
    with pytest.raises(KeyLimitError, match="1 requests a minute"):
        limits.admit("a")
    limits.admit("b")


def test_tokens_are_paid_afterwards() -> None:
    clock = Clock()
    limits = KeyLimits(tokens=60, clock=clock)
    limits.admit("a")
    limits.charge("a", 90)
    with pytest.raises(KeyLimitError) as refused:
        limits.admit("a")
    assert refused.value.retry_after == 31  # 30 are owed, and 1 must be left
    clock.now = 31
    limits.admit("a")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server() -> AsyncIterator[Api]:
    async with api("One, two, three.$", step_seconds=0.02) as server:
        yield server


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("options", "kind"),
    [({"key_requests": 1}, "requests"), ({"key_tokens": 5}, "tokens")],
    ids=lambda x: str(x),
)
async def test_a_key_that_has_used_its_share(server: Api, options: dict[str, Any], kind: str) -> None:
    limited = server.configure(api_keys=("one", "two"), **options)

    async def ask(key: str) -> Any:
        headers = {"Authorization": f"Bearer {key}"}
        return await limited.http.post("/v1/chat/completions", json={"messages": HI}, headers=headers)

    assert (await ask("one")).status_code == 200
    refused = await ask("one")
    assert error_of(refused, 429, "rate_limit_error")["code"] == "rate_limit_exceeded"
    assert kind in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) > 1
    assert (await ask("two")).status_code == 200
    models = await limited.http.get("/v1/models", headers={"Authorization": "Bearer one"})
    assert models.status_code == 200


@pytest.mark.asyncio(loop_scope="module")
async def test_an_answer_that_takes_too_long(server: Api) -> None:
    short = server.configure(request_timeout=0.1)
    body = {"messages": HI, "ignore_eos": True, "max_tokens": 100}
    assert error_of(await short.http.post("/v1/chat/completions", json=body))["code"] == "request_timeout"
    streamed = await short.http.post("/v1/chat/completions", json={**body, "stream": True})
    assert "request_timeout" in streamed.text and streamed.text.endswith("data: [DONE]\n\n")
    stats = await server.served.client.stats()
    assert (stats["running"], stats["blocks_held"]) == (0, 0)
    quick = await short.http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 2})
    assert quick.status_code == 200
