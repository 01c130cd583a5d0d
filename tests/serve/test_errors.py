"""Everything a client can send wrong: status, type, code, param, and never a trace of the server's inside."""

from __future__ import annotations

import json
import random
from typing import Any

import openai
import pytest
from serve_fakes import Api
from serve_wire import check_error, error_of

from lmdeploy.serve.openai.protocol import ChatBody, CompletionBody

pytestmark = pytest.mark.asyncio(loop_scope="module")

BAD_BOTH = [
    # field, values that are refused
    ("temperature", [-0.1, 2.1, "hot", True, [1]]),
    ("top_p", [-0.1, 1.1, "1"]),
    ("top_k", [-2, 1.5, "1"]),
    ("min_p", [-0.1, 1.1]),
    ("frequency_penalty", [-2.1, 2.1]),
    ("presence_penalty", [-2.1, 2.1, True]),
    ("repetition_penalty", [0, -1, "1", 1e300, 1e-300]),
    ("n", [0, 129, "1", True, 1.5]),
    ("seed", [1.5, "1", 2**63, -(2**63) - 1, 10**400]),
    ("stop", ["", [""], 5, ["a", 5], ["x"] * 33, "y" * 1025]),
    ("stop_token_ids", [5, ["a"], [-1], [10**6], [1] * 4097]),
    ("max_tokens", [-1, "5", True, 2.5]),
    ("logit_bias", [5, {"-1": 1}, {"abc": 1}, {"99999999": 1}, {"0x1": 1}, {"1": "x"}, {"1": True}]),
    ("stream", ["true", 1]),
    ("ignore_eos", [1]),
    ("min_tokens", [-1]),
    ("repetition_ngram_size", [-1, 1025, "1", 3]),
    ("repetition_ngram_threshold", [-1, 1025, "1"]),
    ("request_id", ["", "x" * 129, "a\nb", 5]),
    ("session_id", [-2, "1", 2**63]),
    ("bad_words", ["x", [5], ["no such word in this vocabulary"]]),
    ("truncate_prompt_tokens", [0]),
    ("model", [5]),
    ("stream_options", [5, {"include_usage": 5}]),
    (
        "response_format",
        [5, {"type": "yaml"}, {"type": "json_schema", "json_schema": {}}, {"type": "json_schema"}],
    ),
    ("guided_json", [5, "{", {"not": {}}]),
    ("guided_regex", [5, "", "(?=a)"]),
    ("guided_choice", [5, [], [""]]),
    ("guided_decoding_backend", [5, "mine"]),
    ("structured_outputs", [5, {"regex": "a", "choice": ["b"]}, {"structural_tag": "x"}]),
    ("allowed_token_ids", [[], [-1], [10**6], ["a"], 5]),
    ("prompt_logprobs", [-1, 21, True, "1"]),
]
BAD_CHAT = [
    ("max_completion_tokens", [0, "5"]),
    ("top_logprobs", [21, -1, 1]),
    ("logprobs", [1, "true"]),
    ("tools", ["f", [1], [{"type": "function"}], [{"type": "function", "function": {"name": ""}}]]),
    ("tool_choice", ["required", {"type": "function", "function": {"name": "f"}}]),
    ("functions", [[{"name": "f"}]]),
    ("audio", [{"voice": "x"}]),
    ("echo", [True]),
    ("modalities", [["text", "audio"]]),
    ("chat_template", ["{{ messages }}"]),
    ("reasoning_effort", ["extreme"]),
    ("chat_template_kwargs", [5, {"messages": []}]),
    ("continue_final_message", [5, True]),
]
BAD_COMPLETIONS = [
    ("suffix", ["x"]),
    ("min_tokens", [17]),  # max_tokens is 16 unless given
    ("logprobs", [21, -1, True]),
    ("echo", [1]),
    ("best_of", [0, 21, "2"]),
    ("prompt", [5, [], [5.5], [[1], "a"], [[-1]], [[999999]], "", [""], {"a": 1}, [[]]]),
]


def _cases(table: list[tuple[str, list[Any]]]) -> list[Any]:
    return [pytest.param(n, v, id=f"{n}={json.dumps(v)[:40]}") for n, values in table for v in values]


@pytest.mark.parametrize(("name", "value"), _cases(BAD_BOTH + BAD_CHAT))
async def test_bad_chat_field(server: Api, name: str, value: Any) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], name: value})
    error = error_of(await server.http.post("/v1/chat/completions", content=body))
    assert error["param"].partition(".")[0].partition("[")[0] == name
    assert len(error["message"]) < 500


@pytest.mark.parametrize(("name", "value"), _cases(BAD_BOTH + BAD_COMPLETIONS))
async def test_bad_completions_field(server: Api, name: str, value: Any) -> None:
    error = error_of(
        await server.http.post("/v1/completions", content=json.dumps({"prompt": "hi", name: value}))
    )
    assert error["param"].partition(".")[0].partition("[")[0] == name


GOOD = [
    {"temperature": 0},
    {"temperature": 1e-7},
    {"temperature": 2},
    {"top_p": 0},
    {"top_k": -1},
    {"top_k": 0},
    {"n": 1.0},
    {"seed": -5},
    {"stop": None, "seed": None, "logprobs": None, "n": None, "stream": None, "stream_options": None},
    {"stream_options": {"include_usage": True}},  # without stream: gateways add it blindly
    {"response_format": {"type": "text"}},
    {"guided_json": None, "structured_outputs": {}},
    {"user": "x", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "never_heard_of": [1]},
    {"logit_bias": {"65": 100, "66": -100}},
    {"bad_words": ["bad"]},
    {"max_tokens": 100000},
    {"min_new_tokens": 2},
    {"logit_bias": {}},
]


@pytest.mark.parametrize("fields", GOOD, ids=lambda f: json.dumps(f)[:40])
async def test_accepted_on_both_routes(server: Api, fields: dict[str, Any]) -> None:
    for response in (await server.chat(**fields), await server.complete(**fields)):
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        assert choice.get("text") or choice["message"]["content"]


async def test_accepted_on_chat(server: Api) -> None:
    for fields in (
        {"tools": [], "tool_choice": None},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"tool_choice": "auto"},
        {"modalities": ["text"], "audio": None},
        {"reasoning_effort": "none"},
        {"documents": []},
        {"add_generation_prompt": False},
    ):
        assert (await server.chat(**fields)).status_code == 200


MESSAGES = [
    ([], "messages"),
    ("", "messages"),
    (None, "messages"),
    ([5], "messages[0]"),
    ([{"role": "user", "content": "a"}, {"content": "x"}], "messages[1].role"),
    ([{"role": "robot", "content": "x"}], "messages[0].role"),
    ([{"role": ["user"], "content": "x"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "assistant", "content": None}], "messages[0].content"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": ["x"]}], "messages[0].content[0].type"),
    (
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}],
            }
        ],
        "messages[0].content[1]",
    ),
    ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0]"),
    ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
]


@pytest.mark.parametrize(("messages", "param"), MESSAGES, ids=lambda m: json.dumps(m)[:50])
async def test_bad_messages(server: Api, messages: Any, param: str) -> None:
    response = await server.http.post("/v1/chat/completions", json={"messages": messages})
    assert error_of(response)["param"] == param


BODIES = [
    b"",
    b"{",
    b"[]",
    b"5",
    b"null",
    b'{"messages": "\xff"}',
    b'{"messages": [], "model": "\\ud800"}',
    b"[" * 50_000,
    b'{"a":' * 50_000,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda b: b[:20].decode("latin-1"))
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_bad_json(server: Api, body: bytes, path: str) -> None:
    error_of(await server.http.post(path, content=body))


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("temperature", 2.1, "between 0 and 2, got 2.1"),
        ("temperature", -0.1, "between 0 and 2, got -0.1"),
        ("n", 0, "between 1 and 128"),
        ("top_k", -2, "between -1 and 2147483647"),
        ("seed", 2**63, f"between {-(2**63)} and {2**63 - 1}"),
        ("max_tokens", 0, f"between 1 and {2**63 - 1}, got 0"),
    ],
)
async def test_a_value_out_of_range_is_told_the_range(
    server: Api, name: str, value: Any, allowed: str
) -> None:
    message = (await server.chat(**{name: value})).json()["error"]["message"]
    assert message.startswith(f"Invalid value for '{name}': must be {allowed}")


async def test_missing_field_has_its_code(server: Api) -> None:
    error = error_of(await server.http.post("/v1/chat/completions", json={"model": "byte-model"}))
    assert (error["code"], error["param"]) == ("missing_required_parameter", "messages")


async def test_large_input_is_not_repeated(server: Api) -> None:
    error = error_of(await server.chat(temperature="x" * 100_000))
    assert len(error["message"]) < 500


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_that_does_not_fit_is_refused(server: Api, stream: bool) -> None:
    """400 before the first event, with words and code that clients know."""
    for response, param in (
        (await server.chat("x" * 600, stream=stream), "messages"),
        (await server.complete("x" * 600, stream=stream), "prompt"),
        (await server.complete([["a" and 97] * 600], stream=stream), "prompt"),
    ):
        error = error_of(response)
        assert error["code"] == "context_length_exceeded"
        assert error["param"].startswith(param)
        assert error["message"].startswith(
            "This model's maximum context length is 512 tokens. However, your "
        )


async def test_huge_prompt_is_refused_without_being_encoded(server: Api) -> None:
    error = error_of(await server.chat("x" * 5_000_000))
    assert error["code"] == "context_length_exceeded"
    assert "at least" in error["message"]


async def test_one_bad_prompt_fails_the_batch(server: Api) -> None:
    error = error_of(await server.complete(["fine", "x" * 600]))
    assert error["code"] == "context_length_exceeded"


async def test_unknown_model_names_the_known_ones(server: Api) -> None:
    for response in (await server.chat(model="gpt-9"), await server.complete(model="gpt-9")):
        error = error_of(response, 404)
        assert error["code"] == "model_not_found"
        assert "The model `gpt-9` does not exist" in error["message"]
        assert "`byte-model`" in error["message"]
        assert "`./models/byte-model`" in error["message"]


async def test_names_that_work(server: Api) -> None:
    for name in ("byte-model", "./models/byte-model"):
        assert (await server.chat(model=name)).json()["model"] == name
    assert (await server.chat()).json()["model"] == "byte-model"


WEIRD: list[Any] = [None, True, False, 0, 1, -1, 2**31, -(2**63), 10**30, 0.5, 1e300, "", "x", "5", "\u0000"]
WEIRD += [
    [],
    {},
    [1],
    ["a"],
    [[]],
    [None],
    {"a": 1},
    {"1": 1},
    {"role": "user"},
    [{"role": "user", "content": "q"}],
]


async def test_random_bodies_never_break_the_server(server: Api) -> None:
    """Any value in any field is an answer or an explained 400."""
    draw = random.Random(5)
    answered = 0
    for path, kind in (("/v1/chat/completions", ChatBody), ("/v1/completions", CompletionBody)) * 300:
        body: dict[str, Any] = {"max_tokens": 2}
        body |= {"messages": [{"role": "user", "content": "hi"}]} if kind is ChatBody else {"prompt": "hi"}
        names = [*kind.model_fields, "tools", "guided_json", "suffix", "functions", "modalities"]
        body |= {name: draw.choice(WEIRD) for name in draw.sample(names, draw.choice([1, 1, 2]))}
        response = await server.http.post(path, json=body)
        assert response.status_code in (200, 400, 404), (body, response.text)
        if response.status_code == 200:
            answered += 1
        else:
            check_error(response.json())
    assert 50 < answered < 500


async def test_error_classes_of_the_official_client(server: Api) -> None:
    create = server.openai.chat.completions.create
    good: Any = {"model": "byte-model", "messages": [{"role": "user", "content": "hi"}]}
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await create(**good, temperature=3)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await create(**{**good, "model": "other"})
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await create(model="byte-model", messages=[{"role": "user", "content": "x" * 600}], stream=True)


@pytest.mark.parametrize("prompt", [["Hello", ""], [[1], []]])
async def test_empty_prompt_among_others_is_named(server: Api, prompt: Any) -> None:
    error = (await server.complete(prompt)).json()["error"]
    assert (error["param"], error["code"]) == ("prompt[1]", "invalid_value")
    assert "prompt[1]" in error["message"]


@pytest.mark.parametrize("field", ["seed", "max_tokens", "min_tokens", "min_new_tokens", "top_k", "n"])
@pytest.mark.parametrize("number", ["1" + "0" * 30, "1e300", "9" * 4000])
async def test_huge_numbers_are_refused_in_a_short_line(server: Api, field: str, number: str) -> None:
    """Under the client's own name for the field, and without repeating the digits."""
    body = f'{{"messages": [{{"role": "user", "content": "x"}}], "{field}": {number}}}'
    headers = {"content-type": "application/json"}
    response = await server.http.post("/v1/chat/completions", content=body, headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, field, "invalid_value")
    assert len(error["message"]) < 200


@pytest.mark.parametrize("fields", [{"top_p": 7}, {"logit_bias": {"99999999": 1}}, {"bad_words": ["abcd"]}])
async def test_wrong_values_have_one_code(server: Api, fields: dict[str, Any]) -> None:
    """Whether the form of the request or what the model allows is the reason."""
    assert (await server.chat(**fields)).json()["error"]["code"] == "invalid_value"
