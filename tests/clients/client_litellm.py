"""litellm: both of its ways to such a server, tools, reasoning, text completion, classes of errors."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest
from expected import ASK_ONE, ASK_SUM, HELLO, KEY, MODEL, SUM, THOUGHT, WEATHER, user

WAYS = [f"openai/{MODEL}", f"hosted_vllm/{MODEL}"]


def ask(base_url: str, model: str, text: str, **fields: Any) -> Any:
    fields = {"api_base": base_url, "api_key": KEY, "num_retries": 0, **fields}
    return litellm.completion(model=model, messages=user(text), **fields)


@pytest.mark.parametrize("model", WAYS)
def test_chat(base_url: str, model: str) -> None:
    answer = ask(base_url, model, "hi")
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (HELLO, "stop")
    stream = ask(base_url, model, "hi", stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == HELLO


@pytest.mark.parametrize("model", WAYS)
@pytest.mark.parametrize("stream", [False, True])
def test_tools(base_url: str, model: str, stream: bool) -> None:
    tools = [{"type": "function", "function": WEATHER}]
    answer = ask(base_url, model, ASK_ONE, tools=tools, stream=stream)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer))
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    assert answer.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("model", WAYS)
def test_reasoning(base_url: str, model: str) -> None:
    message = ask(base_url, model, ASK_SUM).choices[0].message
    assert (message.reasoning_content.strip(), message.content.strip()) == (THOUGHT, SUM)


def test_text_completion(base_url: str) -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="hi", max_tokens=30, api_base=base_url, api_key=KEY
    )
    assert answer.choices[0].text == HELLO


def test_errors(base_url: str) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        ask(base_url, WAYS[0], "word " * 40000)
    with pytest.raises(litellm.NotFoundError):
        ask(base_url, "openai/other", "hi")
    with pytest.raises(litellm.AuthenticationError):
        ask(base_url, WAYS[0], "hi", api_key="wrong")
