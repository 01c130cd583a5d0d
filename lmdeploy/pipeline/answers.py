"""From engine events to `Response` pieces, for any number of prompts at once.

Knows neither prompts nor sampling: requests are built before they come here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable

import numpy as np
import numpy.typing as npt

from lmdeploy.engine.request import Request, TokenEvent, TokenLogprobs
from lmdeploy.errors import UserError, rebuild_error
from lmdeploy.messages import Response
from lmdeploy.runtime.generate import Choice, Delta
from lmdeploy.runtime.local import LocalClient


class Answer:
    """One prompt of a call with its answer: a request and its `Choice`, or the error that refused it."""

    def __init__(self, index: int, request_id: str, made: tuple[Request, Choice] | UserError) -> None:
        self.index = index
        self.request_id = request_id
        self.error = made if isinstance(made, UserError) else None
        self._made = None if isinstance(made, UserError) else made
        self._cached = 0
        self._rows: deque[npt.NDArray[np.float32]] = deque()

    @property
    def request(self) -> Request:
        assert self._made is not None
        return self._made[0]

    @property
    def choice(self) -> Choice:
        assert self._made is not None
        return self._made[1]

    def piece(self, event: TokenEvent) -> Response:
        """What this event adds to the answer."""
        self._cached = max(self._cached, event.cached_tokens)
        if event.logits is not None:
            self._rows.extend(event.logits)
        delta = self.choice.feed(event)
        response = self._response(delta)
        if event.finish_reason == "error":
            error = rebuild_error(event.error_kind, event.error or "")
            response.error_code, response.error_message = error.code or error.type, error.message
        return response

    def _response(self, delta: Delta) -> Response:
        printed = len(delta.token_ids) - (delta.silent_stop is not None)
        rows = [self._rows.popleft() for _ in range(min(printed, len(self._rows)))]
        return Response(
            text=delta.text,
            generate_token_len=self.choice.generated,
            input_token_len=len(self.request.prompt_ids),
            finish_reason=delta.finish_reason,
            token_ids=list(delta.token_ids[:printed]),
            logprobs=[_as_dict(x) for x in delta.logprobs[:printed]] if delta.logprobs else None,
            logits=np.stack(rows) if rows else None,
            index=self.index,
            cached_tokens=self._cached,
        )

    def refusal(self, error: UserError) -> Response:
        """The whole answer of a prompt that was refused."""
        length = len(self._made[0].prompt_ids) if self._made is not None else 0
        return Response(
            finish_reason="error",
            index=self.index,
            input_token_len=length,
            error_code=error.code or error.type,
            error_message=error.message,
        )


def _as_dict(logprobs: TokenLogprobs) -> dict[int, float]:
    best = dict(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True))
    return {logprobs.token_id: logprobs.logprob, **best}


def follow(client: LocalClient, answers: Iterable[Answer]) -> Generator[Response, None, None]:
    """Pieces of all answers as they come; the last one of each has a finish_reason.

    Closing the generator aborts what still runs.
    """
    running: dict[str, Answer] = {}
    try:
        for answer in answers:
            error = answer.error or _add(client, answer, running)
            if error is not None:
                yield answer.refusal(error)
        while running:
            for event in client.events(running):
                piece = running[event.request_id].piece(event)
                if piece.finish_reason is not None:
                    ended = running.pop(event.request_id)
                    if ended.choice.matched is not None:
                        client.abort([ended.request_id])
                if piece.token_ids or piece.text or piece.finish_reason is not None:
                    yield piece
    finally:
        client.abort(running)


def _add(client: LocalClient, answer: Answer, running: dict[str, Answer]) -> UserError | None:
    try:
        client.add(answer.request)
    except UserError as error:
        return error
    running[answer.request_id] = answer
    return None
