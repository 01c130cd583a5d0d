"""Conversations through `Pipeline.chat` on the fake executor."""

from __future__ import annotations

from typing import Any

import pytest
from byte_model import make_engine, make_frontend

from lmdeploy.config import GenerationConfig
from lmdeploy.errors import RequestError
from lmdeploy.messages import Response
from lmdeploy.pipeline import Pipeline, Session

LONG = GenerationConfig(max_new_tokens=50, ignore_eos=True)


def make(script: str | bytes = "Ja.$", session_len: int = 512) -> Pipeline:
    return Pipeline(make_engine(script), make_frontend(session_len))


def talk(pipe: Pipeline, prompt: Any, session: Session | None = None) -> Session:
    session = pipe.chat(prompt, session)  # type: ignore[assignment]
    assert isinstance(session, Session)
    return session


def test_history_is_sent_again() -> None:
    pipe = make()
    session = talk(pipe, "Eins?")
    talk(pipe, "Zwei?", session)
    assert session.history == [("Eins?", "Ja."), ("Zwei?", "Ja.")]
    expected = pipe.frontend.chat_ids(
        [
            {"role": "user", "content": "Eins?"},
            {"role": "assistant", "content": "Ja."},
            {"role": "user", "content": "Zwei?"},
        ]
    )
    assert session.response is not None
    assert session.response.input_token_len == len(expected)
    assert session.response.text == "Ja."
    assert session.response.cached_tokens > 0


def test_messages_as_prompt() -> None:
    session = talk(make(), [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}])
    assert [m["role"] for m in session.messages("V")] == ["system", "user", "assistant", "user"]


def test_stream_is_the_same_answer() -> None:
    pipe = make()
    session = pipe.session()
    stream = pipe.chat("Eins?", session, stream_response=True)
    assert "".join(piece.text for piece in stream) == "Ja."  # type: ignore[union-attr]
    assert session.history == [("Eins?", "Ja.")]
    assert isinstance(session.response, Response)
    assert session.response.finish_reason == "stop"


def test_abort_ends_the_answer_and_frees_it() -> None:
    pipe = make(b"abcdefghijklmnop")
    session = pipe.session()
    pieces = []
    for piece in pipe.chat("x", session, LONG, stream_response=True):  # type: ignore[union-attr]
        pieces.append(piece)
        if len(pieces) == 3:
            session.abort()
    assert pieces[-1].finish_reason == "abort"
    assert session.history == [("x", "abc")]
    assert pipe.stats().blocks_held == 0


def test_leaving_the_stream_keeps_what_was_said() -> None:
    pipe = make(b"abcdefghijklmnop")
    session = pipe.session()
    stream = pipe.chat("x", session, LONG, stream_response=True)
    assert next(stream).text == "a"  # type: ignore[arg-type]
    stream.close()  # type: ignore[union-attr]
    assert session.history == [("x", "a")]
    assert pipe.stats().running == 0
    talk(pipe, "y", session)


def test_failed_prompt_leaves_no_trace() -> None:
    pipe = make(session_len=64)
    session = talk(pipe, "a")
    talk(pipe, "too long " * 20, session)
    assert session.response is not None
    assert session.response.error_code == "context_length_exceeded"
    assert session.history == [("a", "Ja.")]


def test_one_answer_at_a_time() -> None:
    pipe = make(b"")
    session = pipe.session()
    first = pipe.chat("a", session, LONG, stream_response=True)
    next(first)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="still answering"):
        pipe.chat("b", session)
    assert session.history == []
    assert len(list(first)) > 1  # type: ignore[arg-type]


def test_closed_session() -> None:
    pipe = make()
    with pipe.session() as session:
        talk(pipe, "a", session)
    assert session.history == []
    with pytest.raises(RequestError, match="closed"):
        pipe.chat("b", session)
