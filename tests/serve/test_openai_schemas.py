"""The judge of the server tests finds what it is there for."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai_schemas import SchemaError, check, check_response

CHOICE = {
    "index": 0,
    "message": {"role": "assistant", "content": "x", "refusal": None},
    "logprobs": None,
    "finish_reason": "stop",
}
ANSWER = {"id": "a", "object": "chat.completion", "created": 1, "model": "m", "choices": [CHOICE]}


def test_a_good_answer_passes() -> None:
    check("CreateChatCompletionResponse", ANSWER)


@pytest.mark.parametrize(
    "wrong",
    [
        {"choices": [{**CHOICE, "finish_reason": "abort"}]},
        {"choices": [{k: v for k, v in CHOICE.items() if k != "logprobs"}]},
        {"choices": [{**CHOICE, "message": {"role": "assistant", "content": "x"}}]},
        {"object": "chat"},
        {"created": "1"},
        {"usage": {"prompt_tokens": 1}},
    ],
)
def test_a_wrong_answer_is_found(wrong: dict[str, Any]) -> None:
    with pytest.raises(SchemaError):
        check("CreateChatCompletionResponse", {**ANSWER, **wrong})


@pytest.mark.parametrize(
    "body", [{"detail": []}, {"error": "x"}, {"error": {"message": "x"}}, {"message": "x"}]
)
async def test_a_wrong_error_is_found(body: Any) -> None:
    request = httpx.Request("POST", "http://server/v1/chat/completions")
    with pytest.raises(SchemaError):
        await check_response(httpx.Response(400, json=body, request=request))


async def test_a_flat_error_in_a_stream_is_found() -> None:
    request = httpx.Request("POST", "http://server/v1/chat/completions")
    kind = {"content-type": "text/event-stream"}
    for event in ('{"message": "x", "code": 500}', '{"error": "x"}'):
        body = f"data: {event}\n\ndata: [DONE]\n\n"
        with pytest.raises(SchemaError):
            await check_response(httpx.Response(200, text=body, headers=kind, request=request))
