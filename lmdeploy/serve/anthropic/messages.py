"""POST /v1/messages and /v1/messages/count_tokens, by way of the chat route.

Bodies are `protocol`'s, events `output`'s, error bodies `errors`'. Knows no block.
"""

from __future__ import annotations

from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from lmdeploy.errors import LMDeployError
from lmdeploy.runtime.chat_input import normalise_messages
from lmdeploy.serve.anthropic.output import MessageEvents
from lmdeploy.serve.anthropic.protocol import CountBody, MessagesBody, asked
from lmdeploy.serve.openai.chat import Chat
from lmdeploy.serve.openai.prompts import chat_prompt
from lmdeploy.serve.openai.protocol import parse_body
from lmdeploy.serve.served import Server
from lmdeploy.serve.translated import chat_of, finished, renamed, stream_of
from lmdeploy.serve.transport import from_body, json_response, while_connected


class _Prepared(NamedTuple):
    chat: Chat
    events: MessageEvents


async def messages(server: Server, request: Request) -> Response:
    chat, events = await from_body(request, server, _prepare)
    if chat.body.stream:
        return await stream_of(chat, events, request, server.options.keep_alive)
    await while_connected(request.receive, finished(chat, events))
    return json_response(events.message)


def _prepare(server: Server, raw: bytearray) -> _Prepared:
    """Everything that can fail before generation."""
    body: MessagesBody = parse_body(MessagesBody, raw)
    question = asked(body)
    body.messages = []  # a long text is not kept while its answer is made
    chat = chat_of(server, question.body, question.places)
    name = "msg_" + chat.reply.id.rpartition("-")[2]
    return _Prepared(chat, MessageEvents(name, chat.reply.model, body.stop_sequences or []))


async def count_tokens(server: Server, request: Request) -> Response:
    return json_response({"input_tokens": await from_body(request, server, _count)})


def _count(server: Server, raw: bytearray) -> int:
    question = asked(parse_body(CountBody, raw))
    body = question.body
    served, _ = server.model(body.model)
    try:
        return len(chat_prompt(served, body, normalise_messages(body.messages)))
    except LMDeployError as error:
        raise renamed(error, question.places) from None
