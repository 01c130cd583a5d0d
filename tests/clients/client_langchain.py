"""langchain-openai: chat and responses, tools, structured output by all its methods, log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest
from expected import ADA, ASK_ADA, ASK_ONE, ASK_TWO, HELLO, KEY, MODEL, WEATHER, Person
from langchain_openai import ChatOpenAI, OpenAI


def model(base_url: str, **fields: Any) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, api_key=KEY, base_url=base_url, max_retries=0, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("responses", [False, True])
def test_chat(base_url: str, responses: bool) -> None:
    llm = model(base_url, use_responses_api=responses)
    assert llm.invoke("hi").text == HELLO
    assert "".join(chunk.text for chunk in llm.stream("hi")) == HELLO


def test_log_probabilities(base_url: str) -> None:
    answer = model(base_url, logprobs=True).invoke("hi")
    assert answer.response_metadata["logprobs"]["content"]


@pytest.mark.parametrize("responses", [False, True])
def test_tools(base_url: str, responses: bool) -> None:
    llm = model(base_url, use_responses_api=responses).bind_tools([{"type": "function", "function": WEATHER}])
    answer: Any = llm.invoke(ASK_ONE)
    assert [call["args"] for call in answer.tool_calls] == [{"city": "Paris"}]
    whole: Any = None
    for chunk in llm.stream(ASK_TWO):
        whole = chunk if whole is None else whole + chunk
    assert [call["args"] for call in whole.tool_calls] == [{"city": "Paris"}, {"city": "Rome"}]


@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
def test_structured_output(base_url: str, method: Any) -> None:
    llm = model(base_url).with_structured_output(Person, method=method)
    assert llm.invoke(ASK_ADA) == ADA


def test_completions(base_url: str) -> None:
    llm = OpenAI(model=MODEL, api_key=KEY, base_url=base_url, max_retries=0, max_tokens=30)  # type: ignore[call-arg, arg-type]
    assert llm.invoke("hi") == HELLO
    assert "".join(llm.stream("hi")) == HELLO
