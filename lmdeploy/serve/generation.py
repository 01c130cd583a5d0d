"""Runs the answers of one HTTP request: engine requests in, pieces of text out, the same for both modes.

Owns the abort of what nobody waits for any more. Knows no wire format.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from lmdeploy.engine.request import Request, TokenEvent, TokenLogprobs
from lmdeploy.errors import rebuild_error
from lmdeploy.runtime.client import ProcessClient
from lmdeploy.runtime.generate import Choice, Delta
from lmdeploy.runtime.stream import Stream
from lmdeploy.serve.errors import RequestAbortedError, RequestTimeoutError
from lmdeploy.serve.record import RECORD
from lmdeploy.serve.running import Name, Running


@dataclass(slots=True)
class Answer:
    """One choice of one prompt while it is being generated."""

    index: int
    request: Request
    choice: Choice
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event added to one answer."""

    answer: Answer
    delta: Delta


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one HTTP request; each prompt counts once, whatever n.

    `drafted` are guesses of speculative decoding, `accepted` those that were right.
    """

    prompt: int
    completion: int
    cached: int
    drafted: int
    accepted: int
    reasoning: int = 0  # of the completion

    def body(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {
                "reasoning_tokens": self.reasoning,
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": self.drafted - self.accepted,
            },
        }


@dataclass(slots=True)
class Whole:
    """One answer when it is finished. `entries` are the log-probabilities of `token_ids`, when asked for."""

    answer: Answer
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    entries: list[TokenLogprobs] = field(default_factory=list)
    end: Delta = field(default_factory=Delta)


@dataclass(slots=True)
class Generation:
    """All answers of one HTTP request; `per_prompt` of them belong to each prompt, in order."""

    client: ProcessClient
    answers: Sequence[Answer]
    per_prompt: int
    running: Running = field(default_factory=Running)
    names: tuple[Name, ...] = ()  # under which it can be found there while it runs
    timeout: float | None = None  # seconds that all may take
    _stream: Stream | None = field(default=None, init=False)

    async def pieces(self, idle: float | None = None) -> AsyncGenerator[list[Piece], None]:
        """Pieces as they come, those of one moment together; an empty list after `idle` silent seconds.

        Leaving the iterator aborts what still runs. Raises the engine's errors.
        """
        answers = {a.request.request_id: a for a in self.answers}
        deadline = None if self.timeout is None else time.monotonic() + self.timeout
        with self.running.entered(self.names, self._stop):
            self._stream = stream = await self.client.submit(*(a.request for a in self.answers))
            try:
                while not stream.ended:
                    if not await stream.wait(self._patience(idle, deadline)):
                        self._check_time(deadline)
                        yield []
                        continue
                    events = stream.take()
                    pieces = [_piece(stream, answers[event.request_id], event) for event in events]
                    if moment := [piece for piece in pieces if piece is not None]:
                        yield moment
                    _raise_failure(events)
                    self._check_time(deadline)
            finally:
                stream.abort()

    def _patience(self, idle: float | None, deadline: float | None) -> float | None:
        """Seconds to wait for a token: until a sign of life is due or the time is over."""
        if deadline is None:
            return idle
        left = max(0.0, deadline - time.monotonic())
        return left if idle is None else min(idle, left)

    def _check_time(self, deadline: float | None) -> None:
        if deadline is not None and time.monotonic() >= deadline:
            raise RequestTimeoutError(
                f"The answer took longer than the {self.timeout:g} s that this server allows; ask for fewer "
                "tokens."
            )

    def _stop(self) -> None:
        """Somebody asked to end it; whoever waits for pieces gets the error."""
        if self._stream is not None:
            self._stream.push(RequestAbortedError("The request was aborted through /abort_request."))

    async def whole(self) -> list[Whole]:
        """All answers, once they are finished. Raises the engine's errors."""
        wholes = {a.index: Whole(a) for a in self.answers}
        texts: dict[int, list[str]] = {index: [] for index in wholes}
        async with aclosing(self.pieces()) as moments:
            async for piece in (piece async for moment in moments for piece in moment):
                whole = wholes[piece.answer.index]
                texts[piece.answer.index].append(piece.delta.text)
                whole.token_ids += piece.delta.token_ids
                whole.entries += piece.delta.logprobs
                whole.end = piece.delta
        for index, whole in wholes.items():
            whole.text = "".join(texts[index])
        return list(wholes.values())

    def usage(self) -> Usage:
        firsts = self.answers[:: self.per_prompt]
        return Usage(
            prompt=sum(a.prompt_tokens for a in firsts),
            completion=sum(a.choice.generated for a in self.answers),
            cached=sum(a.cached_tokens for a in firsts),
            drafted=sum(a.drafted_tokens for a in self.answers),
            accepted=sum(a.accepted_tokens for a in self.answers),
        )


def _piece(stream: Stream, answer: Answer, event: TokenEvent) -> Piece | None:
    answer.cached_tokens = event.cached_tokens
    answer.drafted_tokens += event.drafted_tokens
    answer.accepted_tokens += event.accepted_tokens
    if event.prompt_logprobs:
        answer.prompt_logprobs = event.prompt_logprobs
    if answer.choice.finished or event.finish_reason in ("error", "abort"):
        return None
    delta = answer.choice.feed(event)
    if answer.choice.finished and event.finish_reason is None:
        stream.abort(event.request_id)
    return Piece(answer, delta)


def _raise_failure(events: Sequence[TokenEvent]) -> None:
    for event in events:
        if event.finish_reason in ("error", "abort"):
            raise rebuild_error(event.error_kind, event.error or "the engine ended this request")


_numbers = itertools.count()


def request_id() -> str:
    """An id for the engine: that of the HTTP request, made unique whatever clients send."""
    record = RECORD.get()
    return f"{record.request_id if record is not None else 'http'}-{next(_numbers)}"
