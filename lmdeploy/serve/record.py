"""What is known of one HTTP request while it is answered: for the access log, metrics and traces.

The record of the request that a task works for is in a context variable, so that whoever learns something,
however deep, can write it down. Knows neither where it is written nor any route.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field

from lmdeploy.serve.passage import Passage


@dataclass(slots=True)
class Record:
    """One request. Times are seconds of time.monotonic()."""

    request_id: str
    method: str
    path: str
    client: str = ""  # address
    key: str = ""  # name of the API key that let it in
    began: float = field(default_factory=time.monotonic)
    at: float = field(default_factory=time.time)  # the same moment for people
    route: str = ""  # the path as it is declared; "" where there is none
    status: int = 0  # 0: the client left before there was one
    sent: int = 0  # bytes of the answer's body
    complete: bool = False  # the answer's last byte was handed over
    ended: float = 0.0
    traceparent: str = ""  # of the trace that the client's call is part of
    model: str = ""  # the name that the request used
    reply_id: str = ""  # the id in the answer
    prompt: str | None = None  # only where it was asked for
    error: str | None = None  # code or type of the error that it got
    passages: list[Passage] = field(default_factory=list)  # one for each answer


RECORD: ContextVar[Record | None] = ContextVar("lmdeploy_request", default=None)
