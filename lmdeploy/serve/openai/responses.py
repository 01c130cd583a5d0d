"""POST /v1/responses: without memory, by way of the chat route.

Owns what a response says of its request. Body and items are `responses_input`'s, events `responses_output`'s.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from lmdeploy.serve.openai.chat import Chat
from lmdeploy.serve.openai.logprobs import chat_logprobs
from lmdeploy.serve.openai.protocol import parse_body
from lmdeploy.serve.openai.responses_input import Asked, ResponsesBody, asked
from lmdeploy.serve.openai.responses_output import ResponseEvents
from lmdeploy.serve.served import Server
from lmdeploy.serve.translated import chat_of, finished, stream_of
from lmdeploy.serve.transport import from_body, json_response, while_connected


class _Prepared(NamedTuple):
    chat: Chat
    events: ResponseEvents


async def responses(server: Server, request: Request) -> Response:
    chat, events = await from_body(request, server, _prepare)
    if chat.body.stream:
        return await stream_of(chat, events, request, server.options.keep_alive)
    await while_connected(request.receive, finished(chat, events))
    return json_response(events.response)


def _prepare(server: Server, raw: bytearray) -> _Prepared:
    """Everything that can fail before generation."""
    body: ResponsesBody = parse_body(ResponsesBody, raw)
    question = asked(body)
    body.input = None  # a long text is not kept while its answer is made
    chat = chat_of(server, question.body, question.places)

    def logprobs(entries: Any) -> list[dict[str, Any]]:
        tokenizer = chat.served.frontend.tokenizer
        content: list[dict[str, Any]] = chat_logprobs(tokenizer, entries, body.top_logprobs or 0)["content"]
        return content

    events = ResponseEvents(_head(chat, body, question), logprobs if body.wants_logprobs else None)
    return _Prepared(chat, events)


def _head(chat: Chat, body: ResponsesBody, question: Asked) -> dict[str, Any]:
    defaults = chat.served.frontend.sampling_defaults
    effort = body.reasoning.effort if body.reasoning else None
    form = (body.text.format if body.text else None) or {"type": "text"}
    return {
        "id": "resp_" + chat.reply.id.rpartition("-")[2],
        "object": "response",
        "created_at": chat.reply.created,
        "completed_at": None,
        "model": chat.reply.model,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "background": False,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": effort, "summary": None},
        "store": False,
        "temperature": defaults.get("temperature") if body.temperature is None else body.temperature,
        "text": {"format": form},
        "tool_choice": body.tool_choice or ("auto" if question.tools else "none"),
        "tools": question.tools,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": defaults.get("top_p") if body.top_p is None else body.top_p,
        "truncation": "disabled",
    }
