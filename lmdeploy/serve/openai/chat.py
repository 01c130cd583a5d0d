"""POST /v1/chat/completions.

Owns the fields of its answers and chunks. Prompt and text come from `runtime.generate`, the run from
`generation`, framing from `sse`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lmdeploy.engine.request import TokenLogprobs
from lmdeploy.runtime.generate import Choice, Delta
from lmdeploy.serve.openai.generation import Answer, Generation, Piece, Whole, request_id
from lmdeploy.serve.openai.logprobs import chat_logprobs, printed
from lmdeploy.serve.openai.messages import normalise_messages
from lmdeploy.serve.openai.prompts import chat_prompt
from lmdeploy.serve.openai.protocol import ChatBody, parse_body
from lmdeploy.serve.openai.served import Served
from lmdeploy.serve.openai.sse import ChunkWriter, encode
from lmdeploy.serve.openai.streaming import stream_response
from lmdeploy.serve.openai.transport import json_response, off_loop, read_body, while_connected

_ROLE = {"role": "assistant", "content": ""}


@dataclass(frozen=True, slots=True)
class Chat:
    """One validated request, ready to run."""

    served: Served
    body: ChatBody
    reply_id: str
    created: int
    model: str
    generation: Generation


async def chat_completions(served: Served, request: Request) -> Response:
    raw = await read_body(request, served.options.max_body)
    chat = await off_loop(len(raw), _prepare, served, raw)
    if chat.body.stream:
        return await stream_response(request, chat.generation, served.options.keep_alive, _Chunks(chat))
    return await while_connected(request.receive, _whole(chat))


def _prepare(served: Served, raw: bytes) -> Chat:
    """Everything that can fail before generation."""
    body: ChatBody = parse_body(ChatBody, raw)
    model = served.name_for(body.model)
    messages = normalise_messages(body.messages)
    limit = body.max_completion_tokens or body.max_tokens
    config = body.generation_config(limit, _logprobs(body))
    ids = chat_prompt(served, body, messages)
    answers = [
        Answer(
            index,
            served.frontend.request(
                request_id(), ids, config, param="messages", choice=index, cache_salt=body.cache_salt or ""
            ),
            Choice(served.frontend, config),
        )
        for index in range(body.choices)
    ]
    generation = Generation(served.client, answers, per_prompt=body.choices)
    reply_id = f"chatcmpl-{uuid.uuid4().hex}"
    served.log_prompt(reply_id, ids)
    return Chat(served, body, reply_id, int(time.time()), model, generation)


def _logprobs(body: ChatBody) -> int | None:
    return (body.top_logprobs or 0) if body.logprobs else None


async def _whole(chat: Chat) -> Response:
    choices = [_choice(chat, whole) for whole in await chat.generation.whole()]
    return json_response(
        {
            "id": chat.reply_id,
            "object": "chat.completion",
            "created": chat.created,
            "model": chat.model,
            "choices": choices,
            "usage": chat.generation.usage().body(),
            "system_fingerprint": chat.served.fingerprint,
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
    """The chunks of one chat stream."""

    def __init__(self, chat: Chat) -> None:
        options = chat.body.stream_options
        self._chat = chat
        self._usage = bool(options and options.include_usage)
        self._running_usage = bool(self._usage and options and options.continuous_usage_stats)
        self._write = ChunkWriter(
            chat.reply_id,
            "chat.completion.chunk",
            chat.created,
            chat.model,
            chat.served.fingerprint,
            self._usage,
        )
        self._started: set[int] = set()

    async def events(self, moments: AsyncIterator[list[Piece]]) -> AsyncGenerator[bytes, None]:
        async for moment in moments:
            yield b"".join(event for piece in moment for event in self._piece(piece))
        if self._usage:
            yield self._write.usage(encode(self._chat.generation.usage().body()))

    def _piece(self, piece: Piece) -> list[bytes]:
        index, delta = piece.answer.index, piece.delta
        out = []
        if index not in self._started:
            self._started.add(index)
            out.append(self._chunk(index, dict(_ROLE), extra=_prompt_ids(self._chat)))
        entries = printed(delta.logprobs, delta)
        ids = {"token_ids": delta.token_ids} if self._chat.body.return_token_ids else {}
        if delta.text or (entries and self._chat.body.logprobs) or (delta.token_ids and ids):
            content = {"content": delta.text}
            out.append(self._chunk(index, content, logprobs=_logprobs_body(self._chat, entries), extra=ids))
        if delta.finish_reason is not None:
            out.append(self._chunk(index, {}, end=_end(delta)))
        return out

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        end: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> bytes:
        fields = {"index": index, "delta": delta, "logprobs": logprobs, **(end or {"finish_reason": None})}
        usage = encode(self._chat.generation.usage().body()) if self._running_usage else None
        return self._write.chunk(encode({**fields, **(extra or {})}), usage)
