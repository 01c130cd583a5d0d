"""No request can make the native executor refuse a batch: what would is refused before, and alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import write_tiny_model

from lmdeploy import TurbomindEngineConfig
from lmdeploy.engine.loop import Engine
from lmdeploy.engine.request import Request, SamplingParams, TokenEvent
from lmdeploy.runtime.build import build_engine
from lmdeploy.runtime.resolve import resolve

EDGES = (
    0.0,
    -0.0,
    1.0,
    1e-300,
    1e-44,
    1e-38,
    1e38,
    1e39,
    1e300,
    -1e300,
    float("inf"),
    float("-inf"),
    float("nan"),
)
NUMBERS = st.one_of(st.sampled_from(EDGES), st.floats())
INTEGERS = st.one_of(st.integers(-3, 300), st.integers(-(2**70), 2**70))
PARAMS = st.builds(
    SamplingParams,
    temperature=NUMBERS,
    top_k=INTEGERS,
    top_p=NUMBERS,
    min_p=NUMBERS,
    repetition_penalty=NUMBERS,
    presence_penalty=NUMBERS,
    frequency_penalty=NUMBERS,
    seed=INTEGERS,
    logit_bias=st.lists(st.tuples(st.integers(-2, 300), NUMBERS), max_size=3).map(tuple),
    logprobs=st.one_of(st.none(), st.integers(0, 2000)),
)
# Mostly sound, with one field that may be anything: otherwise nearly all would be refused.
ONE_WILD = st.one_of(
    PARAMS,
    st.builds(SamplingParams, temperature=NUMBERS),
    st.builds(SamplingParams, temperature=st.just(0.8), top_p=NUMBERS),
    st.builds(SamplingParams, temperature=st.just(0.8), min_p=NUMBERS),
    st.builds(SamplingParams, repetition_penalty=NUMBERS),
    st.builds(SamplingParams, presence_penalty=NUMBERS, frequency_penalty=NUMBERS),
    st.builds(SamplingParams, logit_bias=st.tuples(st.tuples(st.integers(0, 200), NUMBERS))),
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
    return build_engine(resolve(str(folder), TurbomindEngineConfig(session_len=64, max_batch_size=4)))


def run(engine: Engine, **sampling: SamplingParams) -> dict[str, list[TokenEvent]]:
    for name, params in sampling.items():
        engine.add(Request(name, np.array([1, 2, 3], np.int32), max_new_tokens=3, sampling=params))
    events: dict[str, list[TokenEvent]] = {name: [] for name in sampling}
    while engine.has_work:
        for event in engine.step():
            events[event.request_id].append(event)
    return events


@settings(max_examples=300, deadline=None, derandomize=True)
@given(wild=ONE_WILD)
def test_whatever_a_neighbour_carries(engine: Engine, wild: SamplingParams) -> None:
    sound = SamplingParams()
    alone = [event.token_ids for event in run(engine, sound=sound)["sound"]]
    events = run(engine, sound=sound, wild=wild)
    assert [event.token_ids for event in events["sound"]] == alone
    end = events["wild"][-1]
    assert end.finish_reason in ("length", "error")
    assert "batch" not in (end.error or "")
