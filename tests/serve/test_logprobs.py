"""Log-probabilities, echoed prompts and scoring of both routes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from serve_fakes import ANSWER, Api
from serve_wire import USAGE, counts, read_chat, read_completion

pytestmark = pytest.mark.asyncio(loop_scope="module")


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from numbers(item)


async def test_chat_logprobs(server: Api) -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "max_tokens": 200}
    whole = (await server.chat(**fields)).json()["choices"][0]["logprobs"]
    seen = read_chat((await server.chat(**fields, stream=True)).text)
    assert [e for part in seen.logprobs[0] for e in part["content"]] == whole["content"]
    assert b"".join(bytes(e["bytes"]) for e in whole["content"]) == ANSWER.encode()
    assert all(len(e["top_logprobs"]) == 3 for e in whole["content"])
    # A chunk's entries are the tokens whose text it carries.
    for chunk in seen.chunks:
        choice = chunk["choices"][0]
        if choice["logprobs"]:
            text = b"".join(bytes(e["bytes"]) for e in choice["logprobs"]["content"]).decode()
            assert text == choice["delta"]["content"]
    plain = (await server.chat(logprobs=True, max_tokens=3)).json()["choices"][0]["logprobs"]
    assert [e["top_logprobs"] for e in plain["content"]] == [[], [], []]


async def test_logprobs_hold_no_stop_text(server: Api) -> None:
    fields: dict[str, Any] = {"logprobs": True, "stop": "wörld"}
    content = (await server.chat(**fields)).json()["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(e["bytes"]) for e in content) == b"Hello, "
    seen = read_chat((await server.chat(**fields, stream=True)).text)
    assert [e for part in seen.logprobs[0] for e in part["content"]] == content


async def test_logprobs_are_numbers(server: Api) -> None:
    """Also for banned and impossible tokens."""
    for response in (
        await server.chat(logprobs=True, top_logprobs=20, top_k=1, logit_bias={"65": -100}),
        await server.complete(logprobs=20, echo=True, top_k=1),
    ):
        assert response.status_code == 200
        assert "Infinity" not in response.text
        assert "NaN" not in response.text
        found = list(numbers(response.json()["choices"][0]["logprobs"]))
        assert found
        assert all(math.isfinite(x) and x >= -9999.0 for x in found)


async def test_completion_logprobs(server: Api) -> None:
    fields: dict[str, Any] = {"logprobs": 2, "max_tokens": 30}
    choice = (await server.complete(**fields)).json()["choices"][0]
    lists = choice["logprobs"]
    assert len({len(x) for x in lists.values()}) == 1
    for name, value, top in zip(lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True):
        assert top[name] == value
        assert 2 <= len(top) <= 3
    assert lists["text_offset"][:8] == list(range(8))
    assert max(lists["text_offset"]) <= len(choice["text"])
    seen = read_completion((await server.complete(**fields, stream=True)).text)
    assert {k: [x for part in seen.logprobs[0] for x in part[k]] for k in lists} == lists
    only = (await server.complete(logprobs=0, max_tokens=3)).json()["choices"][0]["logprobs"]
    assert [len(top) for top in only["top_logprobs"]] == [1, 1, 1]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo(server: Api, stream: bool) -> None:
    fields: dict[str, Any] = {
        "echo": True,
        "logprobs": 1,
        "max_tokens": 1,
        "temperature": 0,
        "stream": stream,
    }
    prompts = ["wörd", list("wörd".encode())]
    for prompt in (*prompts, [prompts[1], prompts[1]]):
        response = await server.complete(prompt, **fields)
        if stream:
            seen = read_completion(response.text)
            text, parts = seen.text[0], seen.logprobs[0]
        else:
            choice = response.json()["choices"][0]
            text, parts = choice["text"], [choice["logprobs"]]
        assert text == "wördH"
        lists = {k: [x for part in parts for x in part[k]] for k in parts[0]}
        assert len(lists["tokens"]) == len("wörd".encode()) + 1  # one entry for each id
        assert (lists["token_logprobs"][0], lists["top_logprobs"][0]) == (None, None)
        assert all(value is not None for value in lists["token_logprobs"][1:])
        assert lists["text_offset"] == [0, 1, 1, 2, 3, 4]


@pytest.mark.parametrize("stream", [False, True])
async def test_scoring_alone(server: Api, stream: bool) -> None:
    response = await server.complete(
        "abc", echo=True, max_tokens=0, logprobs=1, **({**USAGE} if stream else {})
    )
    if stream:
        seen = read_completion(response.text, usage=True)
        text, finish, usage = seen.text[0], seen.finish[0], seen.usage
        assert seen.logprobs[0][0]["tokens"] == ["a", "b", "c"]
    else:
        body = response.json()
        text, finish, usage = body["choices"][0]["text"], body["choices"][0]["finish_reason"], body["usage"]
        assert body["choices"][0]["logprobs"]["tokens"] == ["a", "b", "c"]
    assert (text, finish) == ("abc", "length")
    assert usage is not None
    assert counts(usage) == (3, 0, 3)


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids(server: Api, stream: bool) -> None:
    response = await server.chat(return_token_ids=True, stream=stream)
    if stream:
        chunks = read_chat(response.text).chunks
        ids = [i for c in chunks for i in c["choices"][0].get("token_ids", [])]
        prompt = chunks[0]["choices"][0]["prompt_token_ids"]
    else:
        ids = response.json()["choices"][0]["token_ids"]
        prompt = response.json()["prompt_token_ids"]
    (end,) = server.served.frontend.tokenizer.eos_ids
    assert ids == [*ANSWER.encode(), end]
    assert server.served.frontend.tokenizer.decode(prompt) == "user\nhi\nassistant\n"
