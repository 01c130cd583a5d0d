"""Both executors with and without drafts: the same tokens, log-probabilities and logits, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from draft_guesses import Guesses
from executors import EXECUTORS, make_executor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_llama import WHOLE_GROUPS, llama, quantized

from lmdeploy.engine.draft_policy import AdaptivePolicy
from lmdeploy.engine.loop import Engine, EngineOptions
from lmdeploy.engine.prompt_lookup import PromptLookup
from lmdeploy.engine.request import Request, SamplingParams
from lmdeploy.engine.speculation import Speculation

VOCAB = 130
Answer = tuple[list[int], list[object], bytes, str]


@pytest.fixture(scope="module", params=EXECUTORS)
def executor(request: pytest.FixtureRequest) -> Any:
    case = quantized(llama(**WHOLE_GROUPS), lambda name: ("int8", 32) if "_proj" in name else None)
    made = make_executor(request.param, case[1], case[2], max_step_tokens=64, max_rows=4, num_blocks=24)
    yield made
    made.close()


@st.composite
def requests(draw: st.DrawFn, number: int) -> Request:
    stem = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12))
    sampling = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.7, 3.0])),
        top_k=draw(st.sampled_from([0, 0, 9])),
        top_p=draw(st.sampled_from([1.0, 0.9])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.6])),
        seed=number,
        logprobs=draw(st.sampled_from([None, 3])),
    )
    return Request(
        request_id=f"r{number}",
        prompt_ids=np.array(stem * draw(st.integers(1, 4)), np.int32),
        max_new_tokens=draw(st.integers(1, 40)),
        sampling=sampling,
        stop_ids=frozenset(draw(st.sets(st.integers(0, VOCAB - 1), max_size=4))),
        min_new_tokens=draw(st.sampled_from([0, 5])),
        want_logits=draw(st.booleans()),
    )


@st.composite
def traffic(draw: st.DrawFn) -> list[tuple[int, Request]]:
    """Requests and the step before which each comes."""
    count = draw(st.integers(1, 4))
    return sorted(
        ((draw(st.integers(0, 12)), draw(requests(i))) for i in range(count)), key=lambda pair: pair[0]
    )


def answers(engine: Engine, arrivals: list[tuple[int, Request]]) -> dict[str, Answer]:
    events: dict[str, list[Any]] = {request.request_id: [] for _, request in arrivals}
    step = 0
    while engine.has_work or step <= arrivals[-1][0]:
        for when, request in arrivals:
            if when == step:
                engine.add(request)
        for event in engine.step():
            events[event.request_id].append(event)
        step += 1
    return {name: _joined(told) for name, told in events.items()}


def _joined(events: list[Any]) -> Answer:
    return (
        [token for e in events for token in e.token_ids],
        [x for e in events for x in e.logprobs],
        b"".join(e.logits.tobytes() for e in events if e.logits is not None),
        events[-1].finish_reason,
    )


def alone(executor: Any, request: Request) -> Answer:
    engine = Engine(executor, EngineOptions(enable_prefix_caching=False))
    return answers(engine, [(0, request)])[request.request_id]


@settings(
    max_examples=12,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(traffic(), st.sampled_from([1, 4, 8]))
def test_equal_bits_with_and_without_drafts(
    executor: Any, arrivals: list[tuple[int, Request]], most: int
) -> None:
    wanted = {r.request_id: alone(executor, r) for _, r in arrivals}
    guesses = Guesses(lambda request: wanted[request.request_id][0], most, poison=VOCAB - 1)
    options = EngineOptions(max_batch_size=3, max_prefill_token_num=16)
    engine = Engine(executor, options, Speculation(guesses, guesses))
    assert answers(engine, arrivals) == wanted
    totals = engine.stats().totals
    assert totals.drafted_tokens >= totals.accepted_tokens
    assert engine.stats().blocks_held == 0


def test_prompt_lookup_takes_fewer_steps_to_the_same_answer(executor: Any) -> None:
    """Bias makes the model repeat a cycle, whatever its weights."""
    prompt = np.array([7, 8, 9, 10, 11] * 4, np.int32)
    sampling = SamplingParams(logit_bias=((7, 60.0),), logprobs=2)
    request = Request("a", prompt, 40, sampling, want_logits=True)
    lookup = PromptLookup(2, 5)
    engine = Engine(executor, None, Speculation(lookup, AdaptivePolicy(lookup.num_kinds, 8)))
    assert answers(engine, [(0, request)])["a"] == alone(executor, request)
    totals = engine.stats().totals
    assert totals.accepted_tokens > 20
    assert totals.steps < 20
