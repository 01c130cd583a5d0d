"""openai-python: chat, completions and responses, streamed and whole, its helpers, its classes of errors."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from expected import (
    ADA,
    ASK_ADA,
    ASK_ONE,
    ASK_SUM,
    ASK_TWO,
    HELLO,
    KEY,
    MODEL,
    SUM,
    THOUGHT,
    TOLD_ONE,
    WEATHER,
    Person,
    user,
)

TOOLS: Any = [{"type": "function", "function": WEATHER}]
FLAT: Any = [{"type": "function", "strict": False, **WEATHER}]


@pytest.fixture(scope="module")
def client(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(api_key=KEY, base_url=base_url, max_retries=0)


def test_models(client: openai.OpenAI) -> None:
    assert client.models.list().data[0].id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=user("hi"), logprobs=True, top_logprobs=2)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == (HELLO, "stop")
    assert choice.logprobs is not None
    joined = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content or ())
    assert joined.decode() == HELLO
    assert answer.usage is not None and answer.usage.prompt_tokens > 0
    assert answer._request_id


def test_chat_streams(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(
        model=MODEL, messages=user("hi"), stream=True, stream_options={"include_usage": True}
    )
    seen = list(chunks)
    assert "".join(c.delta.content or "" for chunk in seen for c in chunk.choices) == HELLO
    assert seen[-1].usage is not None


def test_chat_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=user(ASK_TWO), tools=TOOLS) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    calls = final.choices[0].message.tool_calls or []
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Paris"}, {"city": "Rome"}]
    assert final.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning(client: openai.OpenAI, stream: bool) -> None:
    answer: Any = client.chat.completions.create(model=MODEL, messages=user(ASK_SUM), stream=stream)
    said = [c.choices[0].delta for c in answer] if stream else [answer.choices[0].message]
    thought = "".join(getattr(one, "reasoning_content", None) or "" for one in said)
    text = "".join(one.content or "" for one in said)
    assert (thought.strip(), text.strip()) == (THOUGHT, SUM)


def test_parse(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=user(ASK_ADA), response_format=Person)
    assert answer.choices[0].message.parsed == ADA
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model=MODEL, messages=user(ASK_ADA), response_format=Person, max_completion_tokens=4
        )


def test_tool_loop(client: openai.OpenAI) -> None:
    messages: list[Any] = user(ASK_ONE)
    first = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0]
    assert first.finish_reason == "tool_calls"
    (call,) = first.message.tool_calls or ()
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny, 18"}
    answer = client.chat.completions.create(
        model=MODEL, messages=[*messages, first.message, result], tools=TOOLS
    )
    assert answer.choices[0].message.content == TOLD_ONE


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["Count to ten", "hi"], max_tokens=30, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["1, 2, 3, 4, 5, 6, 7, 8, 9, 10.", HELLO]
    stream = client.completions.create(model=MODEL, prompt="Count to ten", max_tokens=30, stream=True)
    assert "".join(c.text for chunk in stream for c in chunk.choices) == answer.choices[0].text


def test_responses(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="hi", instructions="Be kind.")
    assert (answer.output_text, answer.status) == (HELLO, "completed")
    with client.responses.stream(model=MODEL, input="hi") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == HELLO
    cut = client.responses.create(model=MODEL, input="hi", max_output_tokens=2)
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_responses_parse(client: openai.OpenAI) -> None:
    answer = client.responses.parse(model=MODEL, input=ASK_ADA, text_format=Person)
    assert answer.output_parsed == ADA


def test_responses_tool_loop(client: openai.OpenAI) -> None:
    items: list[Any] = user(ASK_ONE)
    with client.responses.stream(model=MODEL, input=items, tools=FLAT) as stream:
        kinds = [event.type for event in stream]
        first = stream.get_final_response()
    assert "response.function_call_arguments.done" in kinds
    (call,) = (item for item in first.output if item.type == "function_call")
    assert json.loads(call.arguments) == {"city": "Paris"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny, 18"}
    answer = client.responses.create(
        model=MODEL, input=[*items, *(item.to_dict() for item in first.output), result], tools=FLAT
    )
    assert answer.output_text == TOLD_ONE


def test_responses_reasoning(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input=ASK_SUM) as stream:
        thought = "".join(event.delta for event in stream if event.type == "response.reasoning_text.delta")
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message"]
    assert (thought.strip(), final.output_text.strip()) == (THOUGHT, SUM)


def test_errors(client: openai.OpenAI, base_url: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=user("hi"))
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    for create in (client.chat.completions.create, client.responses.create):
        field: Any = "messages" if create == client.chat.completions.create else "input"
        with pytest.raises(openai.BadRequestError) as long:
            create(model=MODEL, **{field: user("word " * 40000)})
        assert (long.value.code, long.value.param) == ("context_length_exceeded", field)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=MODEL, messages=user("hi"), temperature=3, stream=True)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(api_key="wrong", base_url=base_url, max_retries=0).models.list()
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model=MODEL, input="hi")
