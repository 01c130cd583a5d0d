"""POST /v1/chat/completions, and the base of the other chat protocols.

Owns what a chat request means (`prepare_chat`), its run in parts (`Chat`), and the fields of this route's
answers and chunks. Other protocols make a ChatBody of their bodies and their own events of the parts.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lmdeploy.engine.request import TokenLogprobs
from lmdeploy.serve.generation import Generation, Usage
from lmdeploy.serve.openai.answers import make_answer, prompt_logprobs
from lmdeploy.serve.openai.logprobs import chat_logprobs
from lmdeploy.serve.openai.prompts import check_cut, conversation
from lmdeploy.serve.openai.protocol import ChatBody, parse_body
from lmdeploy.serve.openai.reading import Reading, prompt_end
from lmdeploy.serve.openai.streaming import ChunkStream
from lmdeploy.serve.openai.tools import tool_use
from lmdeploy.serve.parsers.answer import Message, PartStream, Said, collect
from lmdeploy.serve.parsers.base import Part, Reasoning, Text, ToolStart
from lmdeploy.serve.served import Reply, Served, Server
from lmdeploy.serve.transport import from_body, json_response, while_connected

_ROLE = {"role": "assistant", "content": ""}


@dataclass(frozen=True, slots=True)
class Moment:
    """What one event added to choice `index`."""

    index: int
    said: Said


@dataclass(frozen=True, slots=True)
class Chat:
    """One validated request, ready to run once. `reply` names the answer as this route would."""

    served: Served
    body: ChatBody
    reply: Reply
    generation: Generation
    streams: Sequence[PartStream]  # one for each choice

    async def moments(self, idle: float | None = None) -> AsyncGenerator[list[Moment], None]:
        """What is said, event by event; an empty list after `idle` silent seconds.

        Leaving the iterator aborts what still runs. Raises the engine's errors.
        """
        async with aclosing(self.generation.pieces(idle)) as pieces:
            async for moment in pieces:
                yield [Moment(p.answer.index, self.streams[p.answer.index].feed(p.delta)) for p in moment]

    async def whole(self) -> list[Message]:
        """All choices, once they are finished. Raises the engine's errors."""
        said: list[list[Said]] = [[] for _ in self.streams]
        async with aclosing(self.moments()) as moments:
            async for moment in moments:
                for one in moment:
                    said[one.index].append(one.said)
        return [collect(choice) for choice in said]

    def usage(self) -> Usage:
        """Token counts so far."""
        reasoning = sum(stream.reasoning_tokens for stream in self.streams)
        return replace(self.generation.usage(), reasoning=reasoning)


def prepare_chat(server: Server, body: ChatBody) -> Chat:
    """Everything that can fail before generation; takes the messages out of `body`. Raises RequestError."""
    served, model = server.model(body.model)
    check_cut(served, body)
    limit = body.max_completion_tokens or body.max_tokens
    config = body.generation_config(limit, (body.top_logprobs or 0) if body.logprobs else None)
    use = tool_use(body.tools, body.tool_choice)
    ids, param = conversation(served, body, use)
    reading = Reading(served, body, use, prompt_end(served, ids, body), server.options.named_tool_finish)
    more: dict[str, Any] = {"param": param, "grammar": reading.grammar(), "printed": reading.printed}
    body.messages = body.input_ids = None  # a long text is not kept while its answer is made
    answers = [
        make_answer(served, body, config, ids, index=index, choice=index, **more)
        for index in range(body.choices)
    ]
    generation = Generation(
        served.client, answers, body.choices, server.running, body.names(), server.options.request_timeout
    )
    reply = served.reply("chatcmpl", model, body.request_id)
    served.log_prompt(reply.id, ids)
    return Chat(served, body, reply, generation, [reading.stream() for _ in answers])


async def chat_completions(server: Server, request: Request) -> Response:
    chat = await from_body(request, server, _prepare)
    if chat.body.stream:
        chunks = _Chunks(chat)
        options = chat.body.stream_options
        head = chat.reply.head("chat.completion.chunk")
        stream = ChunkStream(chat.moments, chat.usage, head, options, chunks.choices_of)
        return await stream.response(request, server.options.keep_alive)
    return await while_connected(request.receive, _whole(chat))


def _prepare(server: Server, raw: bytearray) -> Chat:
    body: ChatBody = parse_body(ChatBody, raw)
    return prepare_chat(server, body)


async def _whole(chat: Chat) -> Response:
    choices = [_choice(chat, index, message) for index, message in enumerate(await chat.whole())]
    return json_response(
        {
            **chat.reply.head("chat.completion"),
            "choices": choices,
            "usage": chat.usage().body(),
            **_prompt_ids(chat),
            **prompt_logprobs(chat.served.frontend.tokenizer, chat.body, chat.generation.answers[0]),
        }
    )


def _end(end: Said | Message) -> dict[str, Any]:
    return {"finish_reason": end.finish_reason, "stop_reason": end.stop_reason}


def _choice(chat: Chat, index: int, message: Message) -> dict[str, Any]:
    choice = {
        "index": index,
        "message": _message(message),
        "logprobs": _logprobs_body(chat, message.logprobs),
        **_end(message),
    }
    return {**choice, "token_ids": message.token_ids} if chat.body.return_token_ids else choice


def _message(message: Message) -> dict[str, Any]:
    text = message.text or (None if message.calls or message.reasoning else "")
    out: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if message.reasoning:
        out |= _reasoning(message.reasoning)
    if message.calls:
        out["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in message.calls
        ]
    return out


def _reasoning(text: str) -> dict[str, str]:
    """Under both names that clients look for."""
    return {"reasoning_content": text, "reasoning": text}


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

    def choices_of(self, moment: Moment) -> list[dict[str, Any]]:
        index, said = moment.index, moment.said
        out = []
        if index not in self._started:
            self._started.add(index)
            out.append(_chunk(index, dict(_ROLE), **_prompt_ids(self._chat)))
        deltas = [_delta(part) for part in said.parts]
        logprobs = _logprobs_body(self._chat, said.logprobs)
        tokens = {"token_ids": said.token_ids} if self._chat.body.return_token_ids else {}
        if not deltas and ((said.logprobs and logprobs) or (said.token_ids and tokens)):
            deltas = [{"content": ""}]
        for number, delta in enumerate(deltas):
            # All tokens of the moment stand in its first chunk.
            more = {"logprobs": logprobs, **tokens} if number == 0 else {}
            out.append(_chunk(index, delta, **more))
        if said.finish_reason is not None:
            out.append(_chunk(index, {}, **_end(said)))
        return out


def _delta(part: Part) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"content": part.text}
    if isinstance(part, Reasoning):
        return dict(_reasoning(part.text))
    if isinstance(part, ToolStart):
        function = {"name": part.name, "arguments": ""}
        call = {"index": part.index, "id": part.id, "type": "function", "function": function}
    else:
        call = {"index": part.index, "function": {"arguments": part.text}}
    return {"tool_calls": [call]}


def _chunk(index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
