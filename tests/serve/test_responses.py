"""POST /v1/responses: what its items mean, its object, its events, its refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from event_streams import events as stream_events
from event_streams import read_response
from openai_schemas import check
from serve_fakes import ANSWER, Api
from serve_wire import error_of

from lmdeploy.errors import EngineDeadError, RequestError
from lmdeploy.serve.generation import Usage
from lmdeploy.serve.openai.protocol import parse_body
from lmdeploy.serve.openai.responses_input import ResponsesBody, asked
from lmdeploy.serve.openai.responses_output import ResponseEvents
from lmdeploy.serve.parsers.answer import Said
from lmdeploy.serve.parsers.base import Part, Reasoning, Text, ToolArguments, ToolStart

pytestmark = pytest.mark.asyncio(loop_scope="module")

HEAD: dict[str, Any] = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "model": "m",
    "error": None,
    "incomplete_details": None,
    "instructions": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "temperature": 1.0,
    "top_p": 1.0,
    "tool_choice": "auto",
    "tools": [],
}
USAGE = Usage(prompt=7, completion=5, cached=2, drafted=0, accepted=0)
CALL = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "call_1",
    "name": "look",
    "arguments": '{"at":"sky"}',
}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "blue"}


async def post(server: Api, **fields: Any) -> dict[str, Any]:
    response = await server.http.post("/v1/responses", json={"input": "hi", "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def without_ids(value: Any) -> Any:
    """The same object without what is new in every answer."""
    if isinstance(value, dict):
        new = ("id", "item_id", "created_at", "completed_at")
        return {key: without_ids(item) for key, item in value.items() if key not in new}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


async def test_an_answer(server: Api) -> None:
    body = await post(server, instructions="Be short.", metadata={"a": "b"}, user="u", store=True)
    (message,) = body["output"]
    (part,) = message["content"]
    assert part == {"type": "output_text", "text": ANSWER, "annotations": [], "logprobs": []}
    assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
    assert (body["object"], body["status"], body["error"]) == ("response", "completed", None)
    assert (body["id"][:5], message["id"][:4]) == ("resp_", "msg_")
    assert (body["metadata"], body["instructions"], body["store"]) == ({"a": "b"}, "Be short.", False)
    usage = body["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_tokens"] == len(ANSWER.encode()) + 1


async def test_the_stream_says_the_same(server: Api) -> None:
    whole = await post(server, instructions="Be short.")
    response = await server.http.post(
        "/v1/responses", json={"input": "hi", "temperature": 0, "instructions": "Be short.", "stream": True}
    )
    seen = read_response(response.text)
    assert seen.texts == [ANSWER]
    final = without_ids(seen.final)
    counted = final.pop("usage"), without_ids(whole).pop("usage")
    assert counted[0]["output_tokens"] == counted[1]["output_tokens"]
    assert final == {key: value for key, value in without_ids(whole).items() if key != "usage"}


async def test_cut_by_length(server: Api) -> None:
    body = await post(server, max_output_tokens=5)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (body["output"][0]["status"], body["max_output_tokens"]) == ("incomplete", 5)
    fields = {"input": "hi", "max_output_tokens": 5, "stream": True}
    response = await server.http.post("/v1/responses", json=fields)
    assert read_response(response.text).kinds[-1] == "response.incomplete"


async def test_the_same_prompt_as_on_the_chat_route(server: Api) -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]
    messages += [{"role": "assistant", "content": "yo"}, {"role": "user", "content": "again"}]
    answer = await server.http.post("/v1/chat/completions", json={"messages": messages, "temperature": 0})
    items = [{"role": m["role"], "content": m["content"]} for m in messages[1:]]
    items[1] = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yo"}]}  # type: ignore[dict-item]
    body = await post(server, instructions="S", input=items)
    usage = answer.json()["usage"]
    assert body["usage"]["input_tokens"] == usage["prompt_tokens"]
    assert body["output"][0]["content"][0]["text"] == answer.json()["choices"][0]["message"]["content"]


async def test_log_probabilities(server: Api) -> None:
    body = await post(server, include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=4)
    part = body["output"][0]["content"][0]
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])


async def test_the_official_client(server: Api) -> None:
    response = await server.openai.responses.create(model="byte-model", input="hi", temperature=0)
    assert response.output_text == ANSWER
    async with server.openai.responses.stream(model="byte-model", input="hi", temperature=0) as stream:
        texts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert "".join(texts) == final.output_text == ANSWER


def messages_of(items: Any, **fields: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = asked(parse_body(ResponsesBody, {"input": items, **fields})).body.messages
    return found


async def test_items_of_one_turn_are_one_message() -> None:
    think = {"type": "reasoning", "id": "rs_1", "summary": []}
    think["content"] = [{"type": "reasoning_text", "text": "hm"}]
    said = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "let me see"}],
    }
    turn = messages_of(
        [{"role": "user", "content": "?"}, think, said, CALL, {**CALL, "call_id": "call_2"}, RESULT]
    )
    assert [m["role"] for m in turn] == ["user", "assistant", "tool"]
    function = {"name": "look", "arguments": '{"at":"sky"}'}
    assert turn[1] == {
        "role": "assistant",
        "content": [{"type": "text", "text": "let me see"}],
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": name, "type": "function", "function": function} for name in ("call_1", "call_2")
        ],
    }
    assert turn[2] == {"role": "tool", "tool_call_id": "call_1", "content": "blue"}


async def test_a_call_without_words_begins_a_turn() -> None:
    turn = messages_of([{"role": "user", "content": "?"}, CALL, RESULT, CALL, RESULT])
    assert [m["role"] for m in turn] == ["user", "assistant", "tool", "assistant", "tool"]
    assert turn[1]["content"] is None


async def test_instructions_and_a_developers_words_are_one_system_text() -> None:
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "D"}]},
        {"role": "user", "content": "u"},
    ]
    system, user = messages_of(items, instructions="I")
    assert system == {"role": "system", "content": [{"type": "text", "text": t} for t in ("I", "D")]}
    assert user["role"] == "user"


async def test_tools_of_other_types_are_left_out_and_faults_name_the_clients_field() -> None:
    tools = [{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": []}]
    question = asked(parse_body(ResponsesBody, {"input": "x", "tools": tools, "tool_choice": "auto"}))
    assert (question.body.tools, question.tools) == (None, [])


REFUSED = [
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": None}, "input"),
    ({"input": ["x"]}, "input[0]"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "judge", "content": "x"}], "instructions": "i"}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "text"}]}]}, "input[0].content[0].text"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]},
        "input[0].content[0]",
    ),
    ({"input": [{"role": "user", "content": [{"type": "video"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
    ({"input": [{"type": ["x"]}]}, "input[0]"),
    ({"input": [{**CALL, "arguments": {}}]}, "input[0].arguments"),
    ({"input": [{**RESULT, "call_id": None}]}, "input[0].call_id"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": {"id": "c"}}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"n": 2}, "n"),
    ({"response_format": {"type": "text"}}, "response_format"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"tools": [5]}, "tools[0]"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"text": {"format": {"type": "poem"}}}, "text.format"),
    ({"top_logprobs": 21}, "top_logprobs"),
]


@pytest.mark.parametrize(
    ("fields", "param"), REFUSED, ids=lambda value: value if isinstance(value, str) else None
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_name_the_field(server: Api, fields: Any, param: str, stream: bool) -> None:
    body = {"input": "hi", "stream": stream, **fields}
    headers = {"content-type": "application/json"}
    error = error_of(await server.http.post("/v1/responses", content=json.dumps(body), headers=headers))
    assert error["param"].startswith(param)
    assert "messages" not in error["message"]


async def test_a_prompt_that_does_not_fit(server: Api) -> None:
    error = error_of(await server.http.post("/v1/responses", json={"input": "x" * 600}))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    assert error["message"].startswith(
        "This model's maximum context length is 512 tokens. However, your messages"
    )


def events_of(parts: list[Part], reason: str = "stop", cut: int = 1000) -> str:
    """The stream of an answer of `parts`, each text cut into pieces of `cut`."""
    events = ResponseEvents(HEAD)
    out = events.begin(USAGE)
    for part in parts:
        if isinstance(part, ToolStart):
            out += events.say(Said([part]))
            continue
        for start in range(0, len(part.text), cut):
            piece = part.text[start : start + cut]
            same = ToolArguments(part.index, piece) if isinstance(part, ToolArguments) else type(part)(piece)
            out += events.say(Said([same]))
    out += events.say(Said([], finish_reason=reason))
    return as_published(out + events.end(USAGE))


def as_published(stream: bytes) -> str:
    """The same stream, of which each event is as OpenAI's schema wants it."""
    for one in stream_events(stream.decode()):
        check("ResponseStreamEvent", one)
    return stream.decode()


PARTS: list[Part] = [
    Reasoning("I should look."),
    Text("Let me look."),
    ToolStart(0, "call_a", "look"),
    ToolArguments(0, '{"at": "sky"}'),
    ToolStart(1, "call_b", "wait"),
    ToolArguments(1, "{}"),
]


@pytest.mark.parametrize("cut", [1, 3, 1000])
async def test_thoughts_words_and_calls(cut: int) -> None:
    seen = read_response(events_of(PARTS, "tool_calls", cut))
    thought, message, first, second = seen.final["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "I should look."}]
    assert (thought["type"], thought["summary"]) == ("reasoning", [])
    assert message["content"][0]["text"] == "Let me look."
    assert (first["name"], first["call_id"], first["arguments"]) == ("look", "call_a", '{"at": "sky"}')
    assert (second["name"], second["call_id"], second["arguments"]) == ("wait", "call_b", "{}")
    assert seen.final["status"] == "completed"


async def test_an_empty_answer_is_an_empty_message() -> None:
    (message,) = read_response(events_of([])).final["output"]
    assert message["content"][0]["text"] == ""


async def test_an_answer_that_fails() -> None:
    events = ResponseEvents(HEAD)
    out = events.begin(USAGE) + events.say(Said([Text("so")])) + events.fail(EngineDeadError("gone"))
    seen = read_response(as_published(out))
    assert seen.kinds[-1] == "response.failed"
    assert seen.final["error"] == {"code": "server_error", "message": "gone"}


async def test_faults_of_the_chat_route_are_told_in_the_clients_words() -> None:
    with pytest.raises(RequestError, match=r"^Invalid value for 'text\.format\.type'") as caught:
        asked(parse_body(ResponsesBody, {"input": "x", "text": {"format": {"type": "poem"}}}))
    assert caught.value.param == "text.format.type"
