"""Protocols that are spoken by way of the chat route: a body becomes a ChatBody, what is said becomes events.

Owns the way there (fields that mean the same, names of faults in the client's own words) and the run of an
answer that is a sequence of events. Knows no protocol's events.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import aclosing
from typing import Any, Protocol

import msgspec
from starlette.requests import Request

from lmdeploy.errors import InvalidValueError, LMDeployError
from lmdeploy.serve.errors import internal_error, logger
from lmdeploy.serve.generation import Usage
from lmdeploy.serve.openai.chat import Chat, Moment, prepare_chat
from lmdeploy.serve.openai.protocol import ChatBody, GenerationBody, parse_body
from lmdeploy.serve.parsers.answer import Said
from lmdeploy.serve.served import Server
from lmdeploy.serve.transport import EventStream, while_connected

_STEP = re.compile(r"\.[^.\[]+|\[\d+\]|^[^.\[]+")


def shared_fields(body: GenerationBody, but: Collection[str]) -> dict[str, Any]:
    """The fields a client has set that mean the same on the chat route, without those named in `but`."""
    names = body.model_fields_set & GenerationBody.model_fields.keys() - {*but}
    return {name: value for name in names if (value := getattr(body, name)) is not None}


def refuse(body: GenerationBody, instead: Mapping[str, str]) -> None:
    """Raise for a set field that this protocol spells in another way; `instead` says how."""
    for name, reason in instead.items():
        if getattr(body, name) is not None:
            raise InvalidValueError(f"'{name}' is not a field of this route; {reason}.", param=name)


def chat_body(fields: dict[str, Any], places: Mapping[str, str]) -> ChatBody:
    """A ChatBody of `fields`. `places`: where the client wrote what the chat route calls by the key."""
    try:
        return parse_body(ChatBody, fields)
    except LMDeployError as error:
        raise renamed(error, places) from None


def chat_of(server: Server, body: ChatBody, places: Mapping[str, str]) -> Chat:
    """`prepare_chat` whose faults are named in the client's own words."""
    try:
        return prepare_chat(server, body)
    except LMDeployError as error:
        raise renamed(error, places) from None


def renamed(error: LMDeployError, places: Mapping[str, str]) -> LMDeployError:
    """The same error about the field that the client wrote."""
    if error.param is None:
        return error
    theirs = _place(error.param, places)
    error.message = error.message.replace(f"'{error.param}'", f"'{theirs}'")
    error.args = (error.message,)
    error.param = theirs
    return error


def _place(path: str, places: Mapping[str, str]) -> str:
    """`path` with its longest beginning that `places` knows replaced."""
    ends = [found.end() for found in _STEP.finditer(path)]
    for end in reversed(ends):
        if path[:end] in places:
            return places[path[:end]] + path[end:]
    return path


class Events(Protocol):
    """What a protocol writes: the events of one answer as ready bytes."""

    @property
    def keep_alive(self) -> bytes:
        """Sent when nothing else has been for a while."""
        ...

    def begin(self, usage: Usage) -> bytes: ...

    def say(self, said: Said) -> bytes:
        """Empty when all of it is held back."""
        ...

    def end(self, usage: Usage) -> bytes: ...

    def fail(self, error: LMDeployError) -> bytes:
        """The last event of an answer that cannot go on."""
        ...


def event(kind: str, data: Mapping[str, Any]) -> bytes:
    """One server-sent event named `kind`."""
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"


async def stream_of(chat: Chat, events: Events, request: Request, keep_alive: float) -> EventStream:
    """Starts when the first token exists, or when the client has waited `keep_alive` seconds for it.

    Raises what stops the request before that, and ClientDisconnect.
    """
    moments = chat.moments(keep_alive)
    first = await while_connected(request.receive, anext(moments))
    return EventStream(_failing_well(_written(chat, events, first, moments), events))


async def _written(
    chat: Chat, events: Events, first: list[Moment], moments: AsyncGenerator[list[Moment], None]
) -> AsyncGenerator[bytes, None]:
    async with aclosing(moments):
        yield events.begin(chat.usage()) + _moment(events, first)
        async for moment in moments:
            if ready := _moment(events, moment):
                yield ready
    yield events.end(chat.usage())


def _moment(events: Events, moment: list[Moment]) -> bytes:
    return b"".join(events.say(one.said) for one in moment) if moment else events.keep_alive


async def _failing_well(written: AsyncGenerator[bytes, None], events: Events) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(written):
            async for ready in written:
                yield ready
    except LMDeployError as error:
        yield events.fail(error)
    except Exception:  # the edge of a request whose status is already sent
        logger.exception("a stream failed")
        yield events.fail(internal_error())


async def finished(chat: Chat, events: Events) -> None:
    """Runs the whole answer through `events`, which then hold it. Raises the engine's errors."""
    events.begin(chat.usage())
    async with aclosing(chat.moments()) as moments:
        async for moment in moments:
            _moment(events, moment)
    events.end(chat.usage())
