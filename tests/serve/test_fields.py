"""Fields beyond OpenAI's: what each does to the answer, on every route that has it."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import httpx
import pytest
from serve_fakes import Api, api
from serve_wire import error_of, read_chat, read_completion

from lmdeploy.serve.served import ServerOptions

pytestmark = pytest.mark.asyncio(loop_scope="module")
HI = [{"role": "user", "content": "hi"}]


async def chat_ids(server: Api, **fields: Any) -> list[int]:
    """The prompt that the chat route makes of a body."""
    body = {"messages": HI, "max_tokens": 1, "return_token_ids": True, **fields}
    answer = (await server.http.post("/v1/chat/completions", json=body)).json()
    found: list[int] = answer["prompt_token_ids"]
    return found


async def test_messages_as_text_are_the_prompt_itself(server: Api) -> None:
    assert await chat_ids(server, messages="raw <s>") == [*b"raw ", server.served.frontend.tokenizer.bos_id]
    assert await chat_ids(server, messages="raw", truncate_prompt_tokens=2) == [*b"aw"]
    answer = (await server.http.post("/v1/chat/completions", json={"messages": "x" * 600})).json()
    assert answer["error"]["code"] == "context_length_exceeded"


async def test_input_ids_beside_no_messages(server: Api) -> None:
    for empty in ([], "", None):
        assert await chat_ids(server, messages=empty, input_ids=[65, 66]) == [65, 66]
    both = await server.chat(input_ids=[1])
    assert error_of(both)["param"] == "input_ids"
    for bad in ([], [10**6], ["a"], "ab"):
        body = {"messages": [], "input_ids": bad}
        assert error_of(await server.http.post("/v1/chat/completions", json=body))["param"].startswith(
            "input_ids"
        )


@pytest.mark.parametrize(
    "fields",
    [
        {"documents": [{"text": "x"}]},
        {"chat_template_kwargs": {"a": 1}},
        {"enable_thinking": True},
        {"reasoning_effort": "low"},
        {"continue_final_message": True},
    ],
    ids=lambda f: next(iter(f)),
)
async def test_a_ready_prompt_takes_nothing_for_a_template(server: Api, fields: dict[str, Any]) -> None:
    response = await server.http.post("/v1/chat/completions", json={"messages": "raw", **fields})
    assert error_of(response)["param"] == next(iter(fields))


async def test_preprocessing_cannot_be_left_out_of_messages(server: Api) -> None:
    assert error_of(await server.chat(do_preprocess=False))["param"] == "do_preprocess"
    assert await chat_ids(server, messages="raw", do_preprocess=False) == [*b"raw"]
    assert await chat_ids(server, do_preprocess=True) == await chat_ids(server)


async def test_truncation_keeps_the_tail_and_only_where_asked(server: Api) -> None:
    whole = await chat_ids(server)
    assert await chat_ids(server, truncate_prompt_tokens=4) == whole[-4:]
    assert await chat_ids(server, truncate_prompt_tokens=500) == whole
    error = error_of(await server.chat(truncate_prompt_tokens=513))
    assert error["param"] == "truncate_prompt_tokens"
    body = (await server.http.post("/generate", json={"prompt": "abc", "truncate_prompt_tokens": 2})).json()
    assert body["meta_info"]["prompt_tokens"] == 2
    long = await server.complete("x" * 2_000_000, truncate_prompt_tokens=2)
    assert error_of(long)["param"] == "prompt"


async def test_salts_keep_prefixes_apart(server: Api) -> None:
    for path, prompt in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "s" * 64}]}),
        ("/v1/completions", {"prompt": "t" * 64}),
    ):
        cached = []
        for salt in ("a", "a", "b", None):
            answer = (
                await server.http.post(path, json={**prompt, "cache_salt": salt, "max_tokens": 1})
            ).json()
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached[1] >= 48
        assert cached[0] == cached[2] == cached[3] == 0


async def test_only_allowed_ids(server: Api) -> None:
    async with api("") as free:
        for fields in ({"temperature": 0}, {"temperature": 2, "seed": 3}):
            answer = await free.chat(allowed_token_ids=[48, 112], max_tokens=40, **fields)
            assert set(answer.json()["choices"][0]["message"]["content"]) == {"0", "p"}
    banned = await server.chat(allowed_token_ids=[97], logit_bias={"97": -100})
    assert error_of(banned)["param"] == "allowed_token_ids"
    (end,) = server.served.frontend.tokenizer.eos_ids
    assert error_of(await server.chat(allowed_token_ids=[end], min_tokens=2))["param"] == "allowed_token_ids"


async def test_an_answer_that_repeats_itself_ends() -> None:
    rule = {"repetition_ngram_size": 3, "repetition_ngram_threshold": 3}
    async with api("one, abcabcabcabcabcabc") as server:
        whole = (await server.chat(**rule)).json()["choices"][0]
        assert whole["message"]["content"] == "one, abcabcabc"
        assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", "repetition")
        seen = read_chat((await server.chat(**rule, stream=True)).text)
        assert (seen.text[0], seen.stop_reason[0]) == ("one, abcabcabc", "repetition")
        for body in ({"prompt": "x", **rule}, {"prompt": "x", **rule, "min_tokens": 16, "max_tokens": 30}):
            text = (await server.http.post("/generate", json=body)).json()["text"]
            assert text == ("one, abcabcabc" if "min_tokens" not in body else "one, abcabcabcabc")


async def test_prompt_logprobs_are_those_of_echo(server: Api) -> None:
    body = (await server.complete("some text", echo=True, max_tokens=1, logprobs=2, prompt_logprobs=2)).json()
    (choice,) = body["choices"]
    given, echoed = choice["prompt_logprobs"], choice["logprobs"]
    assert given[0] is None
    assert len(given) == len("some text")
    for position, (char, entry) in enumerate(zip("ome text", given[1:], strict=True), 1):
        assert entry[str(ord(char))]["logprob"] == echoed["token_logprobs"][position]
        assert entry[str(ord(char))]["decoded_token"] == char
        assert {1, 2} <= {one["rank"] for one in entry.values()}
    chat = (await server.chat(prompt_logprobs=0, max_tokens=1, return_token_ids=True)).json()
    names = [next(iter(entry)) for entry in chat["prompt_logprobs"][1:]]
    assert names == [str(i) for i in chat["prompt_token_ids"][1:]]
    scored = (await server.complete("ab", echo=True, max_tokens=0, prompt_logprobs=1)).json()
    assert len(scored["choices"][0]["prompt_logprobs"]) == 2
    assert "prompt_logprobs" not in (await server.chat()).json()
    assert error_of(await server.chat(prompt_logprobs=1, stream=True))["param"] == "prompt_logprobs"


async def test_request_id_names_the_answer(server: Api) -> None:
    assert (await server.chat(request_id="my/id 1")).json()["id"] == "chatcmpl-my/id 1"
    assert (await server.complete(request_id="mine")).json()["id"] == "cmpl-mine"
    chunks = read_completion((await server.complete(request_id="mine", stream=True)).text).chunks
    assert {chunk["id"] for chunk in chunks} == {"cmpl-mine"}
    both = await asyncio.gather(*(server.chat(request_id="same") for _ in range(2)))
    assert [one.status_code for one in both] == [200, 200]


async def test_values_are_numbers_whatever_is_impossible(server: Api) -> None:
    """K16: no NaN, no infinity, nothing below the floor."""
    for fields in (
        {"logprobs": True, "top_logprobs": 20, "top_k": 1},
        {"logprobs": True, "top_logprobs": 20, "allowed_token_ids": [65]},
        {"logprobs": True, "top_logprobs": 20, "logit_bias": {"72": -100}},
    ):
        response = await server.chat(**fields, max_tokens=5)
        assert response.status_code == 200

        def refuse(name: str) -> float:
            raise AssertionError(name)

        body = json.loads(response.text, parse_constant=refuse)
        for entry in body["choices"][0]["logprobs"]["content"]:
            values = [entry["logprob"], *(top["logprob"] for top in entry["top_logprobs"])]
            assert all(math.isfinite(value) and value >= -9999.0 for value in values)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_aborted_by_name(path: str, stream: bool) -> None:
    async with api("", options=ServerOptions(abort_handling=True), step_seconds=0.01) as server:
        prompt = {"messages": HI} if "chat" in path else {"prompt": "hi"}
        body = {**prompt, "max_tokens": 400, "ignore_eos": True, "temperature": 0, "stream": stream}
        for name in ({"request_id": "it"}, {"session_id": 7}):
            running = asyncio.ensure_future(server.http.post(path, json={**body, **name}))
            await _until(server, 1)
            assert (await abort(server, request_id="other")).json() == {"aborted": 0}
            assert (await abort(server, **name)).json() == {"aborted": 1}
            answer = await asyncio.wait_for(running, 5)
            if stream:
                assert '"code":"request_aborted"' in answer.text
                assert answer.text.endswith("data: [DONE]\n\n")
            else:
                assert error_of(answer, 499)["code"] == "request_aborted"
            await _until(server, 0)


async def test_abort_all_and_who_may_abort(server: Api) -> None:
    async with api("", options=ServerOptions(abort_handling=True), step_seconds=0.01) as slow:
        fields = {"max_tokens": 400, "ignore_eos": True, "temperature": 0}
        running = [asyncio.ensure_future(slow.chat(**fields)) for _ in range(3)]
        await _until(slow, 3)
        assert (await abort(slow, abort_all=True)).json() == {"aborted": 3}
        for answer in await asyncio.gather(*running):
            error_of(answer, 499)
        for bad in ({}, {"session_id": -1}, {"session_id": "x"}, {"request_id": 5}):
            error_of(await abort(slow, **bad))
    error_of(await abort(server, abort_all=True))  # off unless asked for


async def test_a_session_runs_once(server: Api) -> None:
    async with api("", step_seconds=0.01) as slow:
        first = asyncio.ensure_future(slow.chat(session_id=3, max_tokens=50, ignore_eos=True))
        await _until(slow, 1)
        assert error_of(await slow.chat(session_id=3))["param"] == "session_id"
        assert (await slow.chat(session_id=-1, max_tokens=1)).status_code == 200
        assert (await first).status_code == 200
        assert (await slow.chat(session_id=3, max_tokens=1)).status_code == 200


async def abort(server: Api, **body: Any) -> httpx.Response:
    return await server.http.post("/abort_request", json=body)


async def _until(server: Api, running: int) -> None:
    for _ in range(500):
        if (await server.served.client.stats())["running"] == running:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the engine never had so many requests")


async def test_priority_and_key_decide_the_turn(server: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both reach the engine, whose scheduler is tested for what they do."""
    closed = server.configure(api_keys=("secret",))
    seen = []
    make = server.served.frontend.request

    def watched(*args: Any, **fields: Any) -> Any:
        seen.append(make(*args, **fields))
        return seen[-1]

    monkeypatch.setattr(server.served.frontend, "request", watched)
    headers = {"Authorization": "Bearer secret"}
    body = {"messages": HI, "max_tokens": 1, "priority": -3}
    assert (await closed.http.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
    assert (await server.complete(max_tokens=1)).status_code == 200
    assert [r.priority for r in seen] == [-3, 0]
    assert seen[0].account and not seen[1].account
    assert error_of(await server.chat(priority="high"))["param"] == "priority"
