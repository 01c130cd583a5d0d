"""POST /v1/chat/completions.

Owns the fields of its answers and chunks. Prompt and text come from `runtime.generate`, the run from
`generation`, framing from `sse`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lmdeploy.engine.request import TokenLogprobs
from lmdeploy.runtime.chat_input import normalise_messages
from lmdeploy.runtime.generate import Choice, Delta
from lmdeploy.serve.generation import Answer, Generation, Piece, Whole, request_id
from lmdeploy.serve.openai.logprobs import chat_logprobs, printed
from lmdeploy.serve.openai.prompts import chat_prompt
from lmdeploy.serve.openai.protocol import ChatBody, parse_body
from lmdeploy.serve.openai.streaming import ChunkStream
from lmdeploy.serve.served import Reply, Served, Server
from lmdeploy.serve.transport import from_body, json_response, while_connected

_ROLE = {"role": "assistant", "content": ""}


@dataclass(frozen=True, slots=True)
class Chat:
    """One validated request, ready to run."""

    served: Served
    body: ChatBody
    reply: Reply
    generation: Generation


async def chat_completions(server: Server, request: Request) -> Response:
    chat = await from_body(request, server, _prepare)
    if chat.body.stream:
        chunks = _Chunks(chat)
        options = chat.body.stream_options
        stream = ChunkStream(chat.generation, chat.reply, "chat.completion.chunk", options, chunks.choices_of)
        return await stream.response(request, server.options.keep_alive)
    return await while_connected(request.receive, _whole(chat))


def _prepare(server: Server, raw: bytearray) -> Chat:
    """Everything that can fail before generation."""
    body: ChatBody = parse_body(ChatBody, raw)
    served, model = server.model(body.model)
    messages = normalise_messages(body.messages)
    limit = body.max_completion_tokens or body.max_tokens
    config = body.generation_config(limit, _logprobs(body))
    ids = chat_prompt(served, body, messages)
    body.messages = []  # a long text is not kept while its answer is made
    answers = [
        Answer(
            index,
            served.frontend.request(
                request_id(),
                ids,
                config,
                param="messages",
                choice=index,
                cache_salt=body.cache_salt or "",
                streams=bool(body.stream),
            ),
            Choice(served.frontend, config),
        )
        for index in range(body.choices)
    ]
    generation = Generation(served.client, answers, per_prompt=body.choices)
    reply = served.reply("chatcmpl", model)
    served.log_prompt(reply.id, ids)
    return Chat(served, body, reply, generation)


def _logprobs(body: ChatBody) -> int | None:
    return (body.top_logprobs or 0) if body.logprobs else None


async def _whole(chat: Chat) -> Response:
    choices = [_choice(chat, whole) for whole in await chat.generation.whole()]
    return json_response(
        {
            **chat.reply.head("chat.completion"),
            "choices": choices,
            "usage": chat.generation.usage().body(),
            **_prompt_ids(chat),
        }
    )


def _end(delta: Delta) -> dict[str, Any]:
    return {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}


def _choice(chat: Chat, whole: Whole) -> dict[str, Any]:
    choice = {
        "index": whole.answer.index,
        "message": {"role": "assistant", "content": whole.text, "refusal": None},
        "logprobs": _logprobs_body(chat, printed(whole.entries, whole.end)),
        **_end(whole.end),
    }
    return {**choice, "token_ids": whole.token_ids} if chat.body.return_token_ids else choice


def _logprobs_body(chat: Chat, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
    if not chat.body.logprobs:
        return None
    return chat_logprobs(chat.served.frontend.tokenizer, entries, chat.body.top_logprobs or 0)


def _prompt_ids(chat: Chat) -> dict[str, Any]:
    if not chat.body.return_token_ids:
        return {}
    return {"prompt_token_ids": chat.generation.answers[0].request.prompt_ids.tolist()}


class _Chunks:
    """The entries of `choices` in one chat stream."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._started: set[int] = set()

    def choices_of(self, piece: Piece) -> list[dict[str, Any]]:
        index, delta = piece.answer.index, piece.delta
        out = []
        if index not in self._started:
            self._started.add(index)
            out.append(_chunk(index, dict(_ROLE), **_prompt_ids(self._chat)))
        entries = printed(delta.logprobs, delta)
        logprobs = _logprobs_body(self._chat, entries)
        ids = {"token_ids": delta.token_ids} if self._chat.body.return_token_ids else {}
        if delta.text or (entries and logprobs) or (delta.token_ids and ids):
            out.append(_chunk(index, {"content": delta.text}, logprobs=logprobs, **ids))
        if delta.finish_reason is not None:
            out.append(_chunk(index, {}, **_end(delta)))
        return out


def _chunk(index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
