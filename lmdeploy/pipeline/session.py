"""Conversations: what was asked and answered. Knows no engine but for the wish to stop an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from lmdeploy.errors import RequestError
from lmdeploy.messages import Response

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Message | Sequence[Message]  # a text, a message or a list of messages


def as_messages(prompt: Prompt) -> list[Message]:
    """A text as one user message; messages as they are. RequestError for anything else."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, Mapping):
        return [prompt]
    if not isinstance(prompt, list):
        raise RequestError(
            f"a prompt is a text or a list of messages, not {type(prompt).__name__}", param="prompt"
        )
    return prompt


class Session:
    """One conversation, made by `Pipeline.session()`.

    `history` holds (prompt, answer text); `response` is the latest answer and grows while it is streamed.
    """

    def __init__(self, cancel: Callable[[str], None]) -> None:
        self.history: list[tuple[Prompt, str]] = []
        self.response: Response | None = None
        self._cancel = cancel
        self._running: str | None = None
        self._closed = False

    def messages(self, prompt: Prompt) -> list[Message]:
        """The conversation so far with `prompt` as its newest turn."""
        turns: list[Message] = []
        for asked, answer in self.history:
            turns += [*as_messages(asked), {"role": "assistant", "content": answer}]
        return [*turns, *as_messages(prompt)]

    def abort(self) -> None:
        """Stop the running answer; its reader gets what there is, with finish_reason "abort"."""
        if self._running is not None:
            self._cancel(self._running)

    def close(self) -> None:
        """Stop the running answer and forget the conversation; the session cannot be used again."""
        self.abort()
        self.history.clear()
        self._closed = True

    def begin(self, request_id: str, response: Response) -> None:
        """Called by the pipeline when it starts an answer, which grows in `response`."""
        if self._closed:
            raise RequestError(
                "this session is closed; open another one with pipe.session()", param="session"
            )
        if self._running is not None:
            raise RequestError(
                "this session is still answering; read that answer to its end", param="session"
            )
        self._running, self.response = request_id, response

    def end(self) -> None:
        """Called by the pipeline when the answer is over."""
        self._running = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
