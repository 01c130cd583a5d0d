"""Short ways to make requests and to run an engine over the fake executor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from lmdeploy.engine.fake import FakeExecutor
from lmdeploy.engine.loop import Engine, EngineOptions
from lmdeploy.engine.request import Request, SamplingParams, TokenEvent


def request(name: str, prompt: Iterable[int], max_new_tokens: int = 4, **fields: Any) -> Request:
    """A request; keyword arguments that belong to SamplingParams go there."""
    own = {k: fields.pop(k) for k in list(fields) if k in Request.__dataclass_fields__}
    sampling = SamplingParams(**fields)
    return Request(name, np.array(list(prompt), np.int32), max_new_tokens, sampling, **own)


def engine(options: EngineOptions | None = None, **executor: Any) -> Engine:
    return Engine(FakeExecutor(**({"block_size": 4, "num_blocks": 64} | executor)), options)


def drain(eng: Engine) -> dict[str, list[TokenEvent]]:
    """All events until nothing is left, by request."""
    events: dict[str, list[TokenEvent]] = {}
    while eng.has_work:
        for event in eng.step():
            events.setdefault(event.request_id, []).append(event)
    return events


def run(
    *requests: Request, options: EngineOptions | None = None, **executor: Any
) -> dict[str, list[TokenEvent]]:
    """The events of requests added at once to a fresh engine."""
    eng = engine(options, **executor)
    for r in requests:
        eng.add(r)
    return drain(eng)


def tokens(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]
