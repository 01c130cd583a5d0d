"""anthropic-python: messages, streamed and whole, tools, thinking, counting, its classes of errors."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from expected import ASK_ONE, ASK_SUM, HELLO, KEY, MODEL, SUM, THOUGHT, TOLD_ONE, WEATHER, user

TOOLS: Any = [{"name": WEATHER["name"], "input_schema": WEATHER["parameters"]}]


@pytest.fixture(scope="module")
def client(address: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(api_key=KEY, base_url=address, max_retries=0)


def test_a_message(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model=MODEL, max_tokens=100, messages=user("hi"), system="Be kind.")
    assert [block.text for block in answer.content if block.type == "text"] == [HELLO]
    assert answer.stop_reason == "end_turn"
    assert answer._request_id
    cut = client.messages.create(model=MODEL, max_tokens=2, messages=user("hi"))
    assert cut.stop_reason == "max_tokens"
    stopped = client.messages.create(
        model=MODEL, max_tokens=100, messages=user("hi"), stop_sequences=["Then"]
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Then")


def test_a_stream(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model=MODEL, max_tokens=100, messages=user("hi")) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == HELLO
    assert (final.stop_reason, final.usage.output_tokens > 0) == ("end_turn", True)


def test_a_tool_loop(client: anthropic.Anthropic) -> None:
    messages: list[Any] = user(ASK_ONE)
    with client.messages.stream(model=MODEL, max_tokens=100, messages=messages, tools=TOOLS) as stream:
        first = stream.get_final_message()
    (call,) = (block for block in first.content if block.type == "tool_use")
    assert (first.stop_reason, call.input) == ("tool_use", {"city": "Paris"})
    messages += [
        {"role": "assistant", "content": first.content},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny, 18"}],
        },
    ]
    answer = client.messages.create(model=MODEL, max_tokens=100, messages=messages, tools=TOOLS)
    assert [block.text for block in answer.content if block.type == "text"] == [TOLD_ONE]


def test_thinking(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model=MODEL, max_tokens=100, messages=user(ASK_SUM)) as stream:
        final = stream.get_final_message()
    thought, text = final.content
    assert (thought.type, text.type) == ("thinking", "text")
    assert (getattr(thought, "thinking", "").strip(), getattr(text, "text", "").strip()) == (THOUGHT, SUM)


def test_counting(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=user("hi"), tools=TOOLS)
    answer = client.messages.create(model=MODEL, max_tokens=1, messages=user("hi"), tools=TOOLS)
    used = answer.usage
    assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)


def test_errors(client: anthropic.Anthropic, address: str) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="other", max_tokens=5, messages=user("hi"))
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        client.messages.create(model=MODEL, max_tokens=5, messages=user("word " * 40000))
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(api_key="wrong", base_url=address, max_retries=0).models.list()
