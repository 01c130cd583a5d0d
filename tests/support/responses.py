"""What tests of the offline API ask of answers and of a pipeline that has given them."""

from __future__ import annotations

from lmdeploy.messages import Response
from lmdeploy.pipeline import Pipeline


def one(response: Response | list[Response]) -> Response:
    assert isinstance(response, Response)
    return response


def many(responses: Response | list[Response]) -> list[Response]:
    assert isinstance(responses, list)
    return responses


def assert_idle(pipe: Pipeline) -> None:
    stats = pipe.stats()
    assert (stats.running, stats.waiting, stats.blocks_held) == (0, 0, 0)
