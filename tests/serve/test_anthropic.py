"""POST /v1/messages: what its blocks mean, its object, its events, its refusals."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from event_streams import events, read_message
from serve_fakes import ANSWER, Api

from lmdeploy.errors import EngineDeadError
from lmdeploy.serve.anthropic.output import MessageEvents
from lmdeploy.serve.anthropic.protocol import CountBody, asked
from lmdeploy.serve.generation import Usage
from lmdeploy.serve.openai.protocol import parse_body
from lmdeploy.serve.parsers.answer import Said
from lmdeploy.serve.parsers.base import Part, Reasoning, Text, ToolArguments, ToolStart

pytestmark = pytest.mark.asyncio(loop_scope="module")

USAGE = Usage(prompt=7, completion=5, cached=2, drafted=0, accepted=0)
HI = [{"role": "user", "content": "hi"}]


async def send(server: Api, path: str = "", **fields: Any) -> httpx.Response:
    body = {"messages": HI, "max_tokens": 100, "temperature": 0, **fields}
    headers = {"content-type": "application/json", "anthropic-version": "2023-06-01"}
    return await server.http.post("/v1/messages" + path, content=json.dumps(body), headers=headers)


async def post(server: Api, **fields: Any) -> dict[str, Any]:
    response = await send(server, **fields)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def error_of(response: httpx.Response, status: int, kind: str) -> str:
    """The message of an error body, which must have the form that clients of this route read."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert int(response.headers["content-length"]) == len(response.content)
    body = response.json()
    assert set(body) == {"type", "error", "request_id"}
    assert (body["type"], set(body["error"]), body["error"]["type"]) == ("error", {"type", "message"}, kind)
    assert body["request_id"] == response.headers["request-id"]
    return str(body["error"]["message"])


async def test_an_answer(server: Api) -> None:
    body = await post(server, system="Be short.", metadata={"user_id": "u"})
    assert body["content"] == [{"type": "text", "text": ANSWER}]
    assert (body["type"], body["role"], body["id"][:4]) == ("message", "assistant", "msg_")
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    assert body["usage"]["output_tokens"] == len(ANSWER.encode()) + 1


async def test_the_stream_says_the_same(server: Api) -> None:
    whole = await post(server)
    seen = read_message((await send(server, stream=True)).text)
    for body in (whole, seen):
        body.pop("id")
        usage = body["usage"]
        body["usage"] = usage["input_tokens"] + usage["cache_read_input_tokens"], usage["output_tokens"]
    assert seen == whole


@pytest.mark.parametrize("stream", [False, True])
async def test_why_it_ended(server: Api, stream: bool) -> None:
    async def ended(**fields: Any) -> tuple[str, str | None, str]:
        response = await send(server, stream=stream, **fields)
        body = read_message(response.text) if stream else response.json()
        return body["stop_reason"], body["stop_sequence"], body["content"][0]["text"]

    assert await ended(max_tokens=5) == ("max_tokens", None, ANSWER[:5])
    assert await ended(stop_sequences=["zz", "wör"]) == (
        "stop_sequence",
        "wör",
        ANSWER[: ANSWER.index("wör")],
    )
    assert await ended(stop_sequences=["Hello"]) == ("stop_sequence", "Hello", "")


async def test_the_same_prompt_as_on_the_chat_route(server: Api) -> None:
    chat = [{"role": "system", "content": "S"}, *HI, {"role": "assistant", "content": "yo"}, *HI]
    answer = await server.http.post("/v1/chat/completions", json={"messages": chat, "temperature": 0})
    fields: dict[str, Any] = {"system": [{"type": "text", "text": "S"}], "messages": chat[1:]}
    body = await post(server, **fields)
    prompt = answer.json()["usage"]["prompt_tokens"]
    assert body["usage"]["input_tokens"] + body["usage"]["cache_read_input_tokens"] == prompt
    counted = await send(server, "/count_tokens", **fields)
    assert counted.json() == {"input_tokens": prompt}


async def test_an_answer_that_is_begun_is_continued(server: Api) -> None:
    begun = [*HI, {"role": "assistant", "content": "so"}]
    count = [(await send(server, "/count_tokens", messages=m)).json()["input_tokens"] for m in (HI, begun)]
    assert count[1] - count[0] == len("so")


def asked_of(messages: Any = HI, **fields: Any) -> Any:
    return asked(parse_body(CountBody, {"messages": messages, **fields})).body


async def test_blocks_become_messages() -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "sky"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "blue"}]}
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    words = {"type": "text", "text": "let me see", "cache_control": {"type": "ephemeral"}}
    turns = [
        *HI,
        {"role": "assistant", "content": [thinking, {"type": "redacted_thinking", "data": "x"}, words, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
    ]
    _, turn, tool, user = asked_of(turns).messages
    call = {"id": "toolu_1", "type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
    said = [{"type": "text", "text": "let me see"}]
    assert turn == {"role": "assistant", "content": said, "reasoning_content": "hm", "tool_calls": [call]}
    assert tool == {"role": "tool", "tool_call_id": "toolu_1", "content": [{"type": "text", "text": "blue"}]}
    assert user == {"role": "user", "content": [{"type": "text", "text": "and?"}]}


async def test_fields_become_the_chat_routes() -> None:
    body = asked_of(
        stop_sequences=["x"], thinking={"type": "enabled", "budget_tokens": 2000}, top_k=3, seed=1
    )
    assert (body.stop, body.chat_template_kwargs) == (["x"], {"enable_thinking": True})
    assert (body.top_k, body.seed, body.continue_final_message) == (3, 1, None)
    assert asked_of(thinking={"type": "disabled"}).chat_template_kwargs == {"enable_thinking": False}
    assert asked_of(thinking={"type": "adaptive"}).chat_template_kwargs is None


async def test_tools_of_anthropics_servers_are_left_out() -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search"}]
    assert asked_of(tools=tools, tool_choice={"type": "auto"}).tools is None


REFUSED = [
    ({"max_tokens": None}, "'max_tokens'"),
    ({"max_tokens": 0}, "'max_tokens'"),
    ({"messages": None}, "'messages'"),
    ({"messages": []}, "'messages'"),
    ({"messages": ["x"]}, "'messages[0]'"),
    ({"messages": [{"role": "user"}]}, "'messages[0].content'"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "'messages[0].role'"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "'messages[0].content[0].text'"),
    ({"messages": [{"role": "user", "content": [{"type": ["x"]}]}]}, "'messages[0].content[0]'"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
    (
        {
            "system": "s",
            "messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url"}}]}],
        },
        "'messages[0].content[0]'",
    ),
    ({"system": 5}, "'system'"),
    ({"system": [{"type": "image"}]}, "'system[0]'"),
    ({"stop": "x"}, "'stop_sequences'"),
    ({"stop_sequences": [""]}, "'stop_sequences'"),
    ({"temperature": "hot"}, "'temperature'"),
    ({"thinking": {"type": "much"}}, "'thinking.type'"),
    ({"tool_choice": {"type": "some"}}, "'tool_choice.type'"),
    ({"tool_choice": {"type": "any"}}, "'tool_choice'"),
    ({"tools": ["x"]}, "'tools[0]'"),
    ({"mcp_servers": [{}]}, "'mcp_servers'"),
    ({"output_config": {"format": {"type": "poem"}}}, "'output_config.format.type'"),
    ({"n": 2}, "'n'"),
]


@pytest.mark.parametrize(
    ("fields", "named"), REFUSED, ids=lambda value: value if isinstance(value, str) else None
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_name_the_field(server: Api, fields: Any, named: str, stream: bool) -> None:
    message = error_of(await send(server, **{"stream": stream, **fields}), 400, "invalid_request_error")
    assert named in message


async def test_errors_of_every_layer_have_the_form_of_this_route(server: Api) -> None:
    guarded = server.configure(api_keys=("secret",), max_body=3000)
    error_of(await send(guarded), 401, "authentication_error")
    keyed = httpx.AsyncClient(
        transport=httpx.ASGITransport(guarded.app, raise_app_exceptions=False),
        base_url="http://server",
        headers={"x-api-key": "secret"},
    )
    large = await keyed.post("/v1/messages", json={"messages": [{"role": "user", "content": "x" * 4000}]})
    error_of(large, 413, "request_too_large")
    assert (await keyed.post("/v1/messages", json={"messages": HI, "max_tokens": 1})).status_code == 200
    error_of(await server.http.get("/v1/messages"), 405, "invalid_request_error")
    error_of(await server.http.get("/v1/messages/batches"), 404, "not_found_error")
    error_of(await send(server, model="other"), 404, "not_found_error")
    error_of(await send(server.configure(max_requests=0)), 429, "rate_limit_error")
    long = error_of(
        await send(server, messages=[{"role": "user", "content": "x" * 600}]), 400, "invalid_request_error"
    )
    assert long.startswith("This model's maximum context length is 512 tokens.")
    assert "error" in (await server.http.get("/v1/nothing")).json()  # other routes keep their own form


def stream_of(parts: list[Part], reason: str, cut: int) -> str:
    """The stream of an answer of `parts`, each text cut into pieces of `cut`."""
    writer = MessageEvents("msg_1", "m", [])
    out = writer.begin(USAGE)
    for part in parts:
        if isinstance(part, ToolStart):
            out += writer.say(Said([part]))
            continue
        for start in range(0, len(part.text), cut):
            piece = part.text[start : start + cut]
            same = ToolArguments(part.index, piece) if isinstance(part, ToolArguments) else type(part)(piece)
            out += writer.say(Said([same]))
    out += writer.say(Said([], finish_reason=reason))
    out += writer.end(USAGE)
    message = read_message(out.decode())
    assert message == {**writer.message, "usage": message["usage"]}
    return out.decode()


PARTS: list[Part] = [
    Reasoning("I should look."),
    Text("Let me look."),
    ToolStart(0, "call_a", "look"),
    ToolArguments(0, '{"at": "sky"}'),
    ToolStart(1, "call_b", "wait"),
    ToolArguments(1, "{}"),
]


@pytest.mark.parametrize("cut", [1, 3, 1000])
@pytest.mark.parametrize("reason", ["tool_calls", "stop"])  # the chat route says stop for a named call
async def test_thoughts_words_and_calls(cut: int, reason: str) -> None:
    message = read_message(stream_of(PARTS, reason, cut))
    thought, text, first, second = message["content"]
    assert (thought["thinking"], text["text"]) == ("I should look.", "Let me look.")
    assert thought["signature"]
    assert first == {"type": "tool_use", "id": "call_a", "name": "look", "input": {"at": "sky"}}
    assert second == {"type": "tool_use", "id": "call_b", "name": "wait", "input": {}}
    assert message["stop_reason"] == "tool_use"
    assert message["usage"] == {
        "input_tokens": 5,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": 5,
    }


async def test_an_answer_that_fails() -> None:
    writer = MessageEvents("msg_1", "m", [])
    out = writer.begin(USAGE) + writer.say(Said([Text("so")])) + writer.fail(EngineDeadError("gone"))
    last = events(out.decode())[-1]
    assert last["error"] == {"type": "overloaded_error", "message": "gone"}


async def test_a_silent_stream_gets_pings() -> None:
    assert events(MessageEvents.keep_alive.decode()) == [{"type": "ping"}]
