"""Answers of both routes: the same content streamed and whole, and every field as clients read it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from serve_engine import CRASH
from serve_fakes import ANSWER, Api, api
from serve_wire import USAGE, counts, read_chat, read_completion

from lmdeploy.serve.served import ServerOptions

pytestmark = pytest.mark.asyncio(loop_scope="module")

FIELDS = [
    {"max_tokens": 200},
    {"max_tokens": 3},
    {"max_tokens": 16},  # ends inside a character
    {"max_tokens": 200, "stop": ["wörld"]},
    {"max_tokens": 200, "stop": "👩‍👧!", "include_stop_str_in_output": True},
    {"max_tokens": 200, "stop": ["no such text", "<|im_end|>"]},
    {"max_tokens": 200, "stop_token_ids": [ord("!")]},
    {"max_tokens": 60, "ignore_eos": True, "temperature": 0},
    {"max_tokens": 60, "min_tokens": 60, "temperature": 0},
    {"max_tokens": 60, "ignore_eos": True, "temperature": 0, "skip_special_tokens": False},
    {"max_tokens": 20, "n": 3},
    {"max_tokens": 20, "seed": 42, "temperature": 1.5, "ignore_eos": True, "n": 2},
]


@pytest.mark.parametrize("fields", FIELDS, ids=lambda f: json.dumps(f)[:60])
async def test_stream_equals_whole(server: Api, fields: dict[str, Any]) -> None:
    """Text, finish_reason, stop_reason and usage are those of the unstreamed answer."""
    whole = (await server.chat(**fields)).json()
    seen = read_chat((await server.chat(**fields, **USAGE)).text, usage=True)
    assert len(whole["choices"]) == fields.get("n", 1)
    for choice in whole["choices"]:
        index = choice["index"]
        assert seen.text[index] == choice["message"]["content"]
        assert seen.finish[index] == choice["finish_reason"]
        assert seen.stop_reason[index] == choice["stop_reason"]
    assert seen.usage is not None
    assert counts(seen.usage) == counts(whole["usage"])


@pytest.mark.parametrize("fields", FIELDS, ids=lambda f: json.dumps(f)[:60])
async def test_completions_stream_equals_whole(server: Api, fields: dict[str, Any]) -> None:
    whole = (await server.complete(**fields)).json()
    seen = read_completion((await server.complete(**fields, **USAGE)).text, usage=True)
    for choice in whole["choices"]:
        assert seen.text[choice["index"]] == choice["text"]
        assert seen.finish[choice["index"]] == choice["finish_reason"]
    assert seen.usage is not None
    assert counts(seen.usage) == counts(whole["usage"])


async def test_stop_text_never_leaves_the_server(server: Api) -> None:
    """A stop string that begins and ends inside tokens, at every place of the answer."""
    for start in range(0, len(ANSWER) - 5, 3):
        stop = ANSWER[start : start + 5]
        body = (await server.chat(stop=[stop, "zzz"], stream=True)).text
        seen = read_chat(body)
        assert seen.text[0] == ANSWER[: ANSWER.index(stop)]
        assert (seen.finish[0], seen.stop_reason[0]) == ("stop", stop)
        assert seen.comments == 0


async def test_characters_are_sent_whole(server: Api) -> None:
    """Each event is valid by itself, and no half character shows."""
    seen = read_chat((await server.chat(stream=True)).text)
    assert seen.text[0] == ANSWER
    assert "\N{REPLACEMENT CHARACTER}" not in seen.text[0]


async def test_whole_answer(server: Api) -> None:
    body = (await server.chat()).json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert isinstance(body["created"], int)
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"], choice["index"]) == ("stop", None, 0)
    # The chat template's control tokens count, and so does the token that ended the answer.
    prompt = len("user\nhi\nassistant\n") + 3
    assert counts(body["usage"]) == (prompt, len(ANSWER.encode()) + 1, prompt + len(ANSWER.encode()) + 1)
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


async def test_cached_tokens_are_told(server: Api) -> None:
    prompt = "q" * 100
    first, second = [(await server.complete(prompt)).json()["usage"] for _ in range(2)]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == 96
    salted = (await server.complete(prompt, cache_salt="x")).json()["usage"]
    assert salted["prompt_tokens_details"]["cached_tokens"] == 0


REPEATED = "tick tock, tick tock, tick tock, tick tock: ding!$"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 11},
        {"stop": ["ck: d"]},
        {"stop": "tock, tick tock:", "include_stop_str_in_output": True},
        {"logprobs": True, "top_logprobs": 2},
        {"max_tokens": 90, "ignore_eos": True, "temperature": 0.7, "seed": 3, "frequency_penalty": 0.4},
    ],
    ids=lambda f: json.dumps(f)[:60],
)
async def test_guesses_change_nothing_but_their_own_count(fields: dict[str, Any]) -> None:
    bodies = []
    for lookup in (False, True):
        async with api(REPEATED, lookup=lookup) as server:
            body = (await server.chat(**fields)).json()
            seen = read_chat((await server.chat(**fields, **USAGE)).text, usage=True)
        assert seen.text[0] == body["choices"][0]["message"]["content"]
        assert seen.usage is not None
        assert counts(seen.usage) == counts(body["usage"])
        bodies.append(body)
    plain, guessed = (body["choices"] for body in bodies)
    assert guessed == plain
    assert counts(bodies[1]["usage"]) == counts(bodies[0]["usage"])
    details = [body["usage"]["completion_tokens_details"] for body in bodies]
    assert details[0]["accepted_prediction_tokens"] == details[0]["rejected_prediction_tokens"] == 0
    assert details[1]["accepted_prediction_tokens"] > 0 or fields.get("max_tokens") == 11


async def test_large_max_tokens_is_cut_to_the_room(server: Api) -> None:
    """Context 512, never an empty answer."""
    fields = {"max_tokens": 4096, "ignore_eos": True, "temperature": 0}
    body = (await server.complete("x" * 100, **fields)).json()
    assert body["usage"]["completion_tokens"] == 412
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["text"]
    chat = (await server.chat(ignore_eos=True, temperature=0)).json()
    assert chat["usage"]["total_tokens"] == 512  # no max_tokens: the room that is left


async def test_max_tokens_defaults_and_order(server: Api) -> None:
    assert (await server.complete()).json()["usage"]["completion_tokens"] == 16
    both = (await server.chat(max_tokens=9, max_completion_tokens=4)).json()
    assert both["usage"]["completion_tokens"] == 4


async def test_temperature_edges() -> None:
    """What is not 0 samples, and 0 and 1e-7 are greedy."""
    async with api("") as server:

        async def text(**fields: Any) -> str:
            return str((await server.complete(max_tokens=8, **fields)).json()["choices"][0]["text"])

        greedy = await text(temperature=0)
        assert await text(temperature=1e-7) == greedy
        assert await text(temperature=0, top_p=0.5, top_k=7, seed=3) == greedy
        for top_p in (0, 1e-300):
            assert await text(temperature=2, top_p=top_p, seed=3) == greedy
        for temperature in (0.5, 1, 2, None):
            drawn = {await text(temperature=temperature, seed=seed) for seed in range(4)}
            assert len(drawn) == 4
            assert await text(temperature=temperature, seed=1) in drawn


async def test_defaults_of_the_model_hold_where_the_client_is_silent() -> None:
    """The fake draws by every field it is given, so equal texts mean equal fields."""
    async with api("", defaults={"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}) as server:

        async def text(**fields: Any) -> str:
            return str((await server.complete(max_tokens=8, seed=1, **fields)).json()["choices"][0]["text"])

        silent = await text()
        assert silent == await text(temperature=0.6, top_k=20, repetition_penalty=1.1)
        for name, value in (("top_k", -1), ("top_k", 0), ("repetition_penalty", 1.0), ("temperature", 0)):
            assert await text(**{name: value}) != silent
        assert await text(top_k=-1) == await text(top_k=0)


async def test_choices_draw_from_different_streams() -> None:
    async with api("") as server:
        body = (await server.complete(n=3, seed=5, max_tokens=8)).json()
        assert len({c["text"] for c in body["choices"]}) == 3
        again = (await server.complete(n=3, seed=5, max_tokens=8)).json()
        assert [c["text"] for c in again["choices"]] == [c["text"] for c in body["choices"]]
        assert body["usage"]["prompt_tokens"] == 2  # counted once
        assert body["usage"]["completion_tokens"] == 24
        greedy = (await server.complete(n=3, temperature=0, max_tokens=8)).json()
        assert len({c["text"] for c in greedy["choices"]}) == 1


async def test_lists_of_prompts(server: Api) -> None:
    fields: dict[str, Any] = {"n": 2, "echo": True, "max_tokens": 2}
    for prompts in (["a", "b", "c"], [[97], [98], [99]]):
        body = (await server.complete(prompts, **fields)).json()
        assert [c["index"] for c in body["choices"]] == list(range(6))
        assert [c["text"][0] for c in body["choices"]] == list("aabbcc")
        assert counts(body["usage"]) == (3, 12, 15)
        seen = read_completion((await server.complete(prompts, **fields, stream=True)).text)
        assert [seen.text[i] for i in range(6)] == [c["text"] for c in body["choices"]]


async def test_prompt_absent_means_the_begin_token(server: Api) -> None:
    body = (await server.http.post("/v1/completions", json={"return_token_ids": True})).json()
    assert body["choices"][0]["prompt_token_ids"] == [server.served.frontend.tokenizer.bos_id]


async def test_best_of() -> None:
    async with api("") as server:
        fields: dict[str, Any] = {"seed": 1, "max_tokens": 4, "logprobs": 0}
        every = (await server.complete(n=5, **fields)).json()
        best = (await server.complete(n=2, best_of=5, **fields)).json()
        ranked = sorted(every["choices"], key=lambda c: sum(c["logprobs"]["token_logprobs"]), reverse=True)
        assert [c["text"] for c in best["choices"]] == [c["text"] for c in ranked[:2]]
        assert [c["index"] for c in best["choices"]] == [0, 1]
        assert best["usage"]["completion_tokens"] == 20
        hidden = (await server.complete(best_of=5, seed=1, max_tokens=4)).json()["choices"]
        assert [c["logprobs"] for c in hidden] == [None]
        refused = await server.complete(best_of=2, stream=True)
        assert refused.json()["error"]["param"] == "best_of"


async def test_running_usage(server: Api) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = (await server.chat(stream=True, stream_options=options)).text
    seen = read_chat(body, usage=True)
    so_far = [c["usage"]["completion_tokens"] for c in seen.chunks]
    assert so_far == sorted(so_far)
    assert so_far[-1] == len(ANSWER.encode()) + 1


async def rendered(server: Api, messages: list[dict[str, Any]], **fields: Any) -> str:
    response = await server.http.post(
        "/v1/chat/completions", json={"messages": messages, "return_token_ids": True, **fields}
    )
    assert response.status_code == 200, response.text
    ids = response.json()["prompt_token_ids"]
    return server.served.frontend.tokenizer.decode(ids, skip_special_tokens=False)


async def test_messages_reach_the_template(server: Api) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    prompt = await rendered(
        server, [{"role": "developer", "content": "be"}, {"role": "user", "content": parts}]
    )
    assert prompt == (
        "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_assistant_turn_of_tool_calls_only(server: Api) -> None:
    """Content null or missing; a template that knows no tools gets calls and results in words."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    for turn in (
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "tool_calls": [call]},
    ):
        messages = [
            {"role": "user", "content": "q"},
            turn,
            {"role": "tool", "content": "r", "tool_call_id": "c1"},
        ]
        prompt = await rendered(server, messages)
        assert '{"name": "f", "arguments": {"x": 1}}' in prompt
        assert "<tool_response>\nr\n</tool_response><|im_end|>" in prompt


async def test_last_assistant_message(server: Api) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "Sure, "}]
    new_turn = await rendered(server, messages)
    assert new_turn.endswith("<|im_start|>assistant\nSure, <|im_end|>\n<|im_start|>assistant\n")
    continued = await rendered(server, messages, continue_final_message=True)
    assert continued.endswith("<|im_start|>assistant\nSure, ")
    bare = await rendered(server, messages, add_generation_prompt=False)
    assert bare.endswith("Sure, <|im_end|>\n")


async def test_control_tokens_in_text_are_text(server: Api) -> None:
    messages = [{"role": "user", "content": "<|im_end|>"}]
    response = await server.http.post(
        "/v1/chat/completions", json={"messages": messages, "return_token_ids": True}
    )
    control = server.served.frontend.tokenizer.id_of("<|im_end|>")
    assert response.json()["prompt_token_ids"].count(control) == 1


async def test_truncation_only_when_asked(server: Api) -> None:
    body = (await server.complete("x" * 600 + "tail", truncate_prompt_tokens=4, echo=True)).json()
    assert body["usage"]["prompt_tokens"] == 4


async def test_keep_alive_comments_while_waiting() -> None:
    options = ServerOptions(keep_alive=0.1)
    async with api("ab$", options=options, step_seconds=0.35) as server:
        seen = read_chat((await server.chat(stream=True)).text)
        assert seen.comments >= 3
        assert seen.text[0] == "ab"


async def test_failure_before_the_first_token_is_a_plain_answer() -> None:
    async with api("ab$", crashes=True) as server:
        for fields in ({"stream": True}, {}):
            response = await server.complete(chr(CRASH), **fields)
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "service_unavailable"
        assert (await server.complete()).status_code == 200


async def test_prompt_beyond_the_cache_is_the_callers_fault() -> None:
    """The session allows it, the cache cannot hold it; who waits behind is answered."""
    async with api("ab$", num_blocks=4) as server:
        for fields in ({"stream": True}, {}):
            response = await server.complete("x" * 100, **fields)
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "context_length_exceeded"
        assert (await server.complete("x")).status_code == 200


async def test_failure_in_mid_stream_is_an_event() -> None:
    async with api("ab" + chr(CRASH) + "cd$", crashes=True) as server:
        seen = read_chat((await server.chat(stream=True)).text)
        assert seen.error is not None
        assert (seen.error["type"], seen.error["code"]) == ("server_error", "service_unavailable")
        assert seen.text[0].startswith("ab")


async def test_bad_logit_bias_leaves_other_streams_alone(server: Api) -> None:
    stream = await server.openai.completions.create(
        model="byte-model", prompt="x", max_tokens=14, stream=True, temperature=0
    )
    text = ""
    async for chunk in stream:
        text += chunk.choices[0].text
        for bias in ({"99999999": 1}, {"-1": 1}, {"abc": 1}, {"1": "x"}):
            assert (await server.complete(logit_bias=bias)).status_code == 400
    assert text == ANSWER[: len(text)]
    forced = (await server.complete(logit_bias={"65": 100}, max_tokens=2)).json()
    assert forced["choices"][0]["finish_reason"] == "length"


async def test_models(server: Api) -> None:
    listed = await server.openai.models.list()
    assert [m.id for m in listed.data] == ["byte-model"]
    card = (await server.http.get("/v1/models/byte-model")).json()
    assert (card["object"], card["max_model_len"], card["root"]) == ("model", 512, "./models/byte-model")
    assert (await server.openai.models.retrieve("byte-model")).id == "byte-model"


async def test_official_client(server: Api) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    whole = await server.openai.chat.completions.create(model="byte-model", messages=messages)
    assert whole.choices[0].message.content == ANSWER
    assert whole._request_id
    parts = []
    async with server.openai.chat.completions.stream(model="byte-model", messages=messages) as stream:
        async for event in stream:
            if event.type == "content.delta":
                parts.append(event.delta)
        final = await stream.get_final_completion()
    assert "".join(parts) == final.choices[0].message.content == ANSWER
    assert final.choices[0].finish_reason == "stop"
