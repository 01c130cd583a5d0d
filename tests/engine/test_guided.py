"""Guided decoding in the engine: what is drawn, when it ends, and who waits for whom."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from byte_model import make_engine, make_tokenizer

from lmdeploy.engine.batch import U32, Batch
from lmdeploy.engine.fake import FakeExecutor
from lmdeploy.engine.guided import Compilation, Guides, Job
from lmdeploy.engine.loop import Engine
from lmdeploy.engine.request import Grammar, Guide, Request, SamplingParams, TokenEvent
from lmdeploy.errors import RequestError
from lmdeploy.runtime.grammars import LLGrammars, read_vocabulary
from lmdeploy.runtime.structured import (
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    regex_grammar,
)

TOKENIZER = make_tokenizer()
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def ask(name: str, grammar: Grammar | None, count: int = 200, **fields: Any) -> Request:
    prompt = np.frombuffer(f"prompt of {name}".encode(), np.uint8).astype(np.int32)
    sampling = SamplingParams(temperature=1.0, seed=int.from_bytes(name.encode(), "little") % 2**63)
    more = {"stop_ids": TOKENIZER.eos_ids, "grammar": grammar} | fields
    return Request(name, prompt, count, sampling, **more)


def drain(engine: Engine) -> dict[str, list[TokenEvent]]:
    events: dict[str, list[TokenEvent]] = {}
    while engine.has_work:
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    return events


def answers(engine: Engine, *requests: Request) -> dict[str, tuple[str, str | None]]:
    """Text and finish_reason of each request; the engine is closed."""
    for request in requests:
        engine.add(request)
    events = drain(engine)
    engine.close()
    ids = {name: [t for e in of for t in e.token_ids if t != e.stop_id] for name, of in events.items()}
    return {name: (TOKENIZER.decode(ids[name]), events[name][-1].finish_reason) for name in events}


def test_a_regular_expression_is_matched_and_ends_the_answer() -> None:
    requests = [ask(f"r{i}", regex_grammar(r"[a-c]{2,5}-\d{3}")) for i in range(20)]
    for text, reason in answers(make_engine(), *requests).values():
        assert re.fullmatch("[a-c]{2,5}-[0-9]{3}", text), text
        assert reason == "stop"


def test_the_answer_ends_with_the_token_that_closes_it() -> None:
    engine = make_engine('{"name":"x","age":7}   and more')
    engine.add(ask("a", json_schema_grammar(PERSON)))
    events = drain(engine)["a"]
    engine.close()
    assert TOKENIZER.decode([t for e in events for t in e.token_ids]) == '{"name":"x","age":7}'
    assert (events[-1].finish_reason, events[-1].stop_id) == ("stop", None)


def test_what_the_model_would_say_stands_where_the_grammar_allows_it() -> None:
    text, reason = answers(make_engine("nonsense"), ask("a", choice_grammar(["no", "yes"])))["a"]
    assert (text, reason) == ("no", "stop")


def test_neighbours_change_nothing() -> None:
    grammars = [json_schema_grammar(PERSON), None, regex_grammar("[0-9]{5}"), json_object_grammar()]
    requests = [ask(f"r{i}", grammars[i % 4], 60) for i in range(12)]
    together = answers(make_engine(), *requests)
    for request in requests:
        assert answers(make_engine(), request) == {request.request_id: together[request.request_id]}


@pytest.mark.parametrize("script", ["", "abcabcabcabcabcabc"])
def test_speculation_changes_nothing(script: str) -> None:
    grammars = [regex_grammar("(abc){2,9}[0-9]{40}"), regex_grammar("[ab]{60}"), json_object_grammar()]
    requests = [ask(f"r{i}", grammars[i % 3], 80) for i in range(9)]
    plain = answers(make_engine(script), *requests)
    assert answers(make_engine(script, lookup=True), *requests) == plain


def test_drafts_are_those_that_the_grammar_allows() -> None:
    engine = make_engine(lookup=True)
    engine.add(ask("a", regex_grammar("(ab){40}"), 100))
    events = drain(engine)["a"]
    engine.close()
    assert TOKENIZER.decode([t for e in events for t in e.token_ids]) == "ab" * 40
    accepted, drafted = (
        sum(getattr(e, f"{what}_tokens") for e in events) for what in ("accepted", "drafted")
    )
    assert 20 < accepted <= drafted <= accepted + 1  # behind the draft that ends the answer nothing is drawn


def test_preempted_sequences_stay_in_their_grammar() -> None:
    requests = [ask(f"r{i}", regex_grammar("[x-z]{70}"), 100) for i in range(6)]
    engine = make_engine(num_blocks=14)
    for text, reason in answers(engine, *requests).values():
        assert re.fullmatch("[x-z]{70}", text), text
        assert reason == "stop"
    assert engine.stats().totals.preemptions > 0


def test_cut_by_length() -> None:
    text, reason = answers(make_engine(), ask("a", regex_grammar("[1-9]{50}"), 10))["a"]
    assert (len(text), reason) == (10, "length")


def test_min_new_tokens_and_ignored_ends() -> None:
    for i in range(5):
        request = ask(f"r{i}", regex_grammar("[12]{1,30}"), 100, min_new_tokens=20)
        assert len(answers(make_engine(), request)[f"r{i}"][0]) >= 20
    text, reason = answers(make_engine("a$"), ask("b", regex_grammar("a+"), 100, stop_ids=frozenset()))["b"]
    assert (text, reason) == ("a", "stop")


def test_bans_that_leave_nothing_end_one_request_with_a_reason() -> None:
    banned = SamplingParams(logit_bias=((ord("x"), -np.inf),))
    engine = make_engine()
    engine.add(replace(ask("bad", regex_grammar("x+")), sampling=banned))
    engine.add(ask("good", regex_grammar("y{3}")))
    events = drain(engine)
    engine.close()
    assert "grammar" in (events["bad"][-1].error or "")
    assert events["good"][-1].finish_reason == "stop"


def test_a_grammar_that_is_none_ends_with_the_callers_error() -> None:
    engine = make_engine()
    engine.add(ask("bad", Grammar("lark", "start: nothing_of_this_name")))
    engine.add(ask("good", regex_grammar("y{3}")))
    events = drain(engine)
    engine.close()
    assert events["bad"][-1].error_kind == "RequestError"
    assert "nothing_of_this_name" in (events["bad"][-1].error or "")
    assert events["good"][-1].finish_reason == "stop"


def test_an_engine_without_grammars_refuses_them() -> None:
    engine = Engine(FakeExecutor())
    engine.add(ask("a", json_object_grammar()))
    assert engine.step()[0].error_kind == "RequestError"


class Slow:
    """Grammars that are compiled when told to."""

    def __init__(self) -> None:
        self.open = False

    def compile(self, grammar: Grammar) -> Compilation:
        return self  # type: ignore[return-value]

    def done(self) -> bool:
        return self.open

    def guide(self) -> Guide:
        raise RequestError("took too long")

    def wait(self, compilations: list[Compilation], seconds: float) -> None:
        pass

    def fill(self, jobs: list[Job], bits: U32) -> Callable[[], None]:
        raise AssertionError("nobody is guided")

    def close(self) -> None:
        pass


def test_others_go_on_while_a_grammar_is_compiled() -> None:
    slow = Slow()
    engine = Engine(FakeExecutor(), guides=Guides(slow, 1000))
    engine.add(ask("guided", json_object_grammar()))
    engine.add(ask("free", None, 5, stop_ids=frozenset()))
    engine.add(ask("aborted", json_object_grammar()))
    seen = [event for _ in range(8) for event in engine.step()]
    assert {e.request_id for e in seen} == {"free"}
    assert seen[-1].finish_reason == "length"
    assert engine.has_work
    engine.abort("aborted")
    slow.open = True
    ends = {e.request_id: e.finish_reason for _ in range(2) for e in engine.step()}
    assert ends == {"aborted": "abort", "guided": "error"}
    assert not engine.has_work
    assert engine.stats().blocks_held == 0


def test_masks_say_the_same_as_the_samples() -> None:
    """Every token that was drawn is one of its mask's, and scored prompts have none."""
    engine = make_engine(on_step=check_masks)
    engine.add(ask("a", regex_grammar("[a-f]{20}"), prompt_logprobs=0))
    engine.add(ask("b", None, 20))
    assert drain(engine)["a"][-1].finish_reason == "stop"
    engine.close()


def check_masks(batch: Batch) -> None:
    if batch.masks is not None:
        batch.masks.wait()
        assert (batch.masks.index[batch.samples.target_ids >= 0] == -1).all()
        for row in range(len(batch.masks.bits)):
            (sample,) = np.flatnonzero(batch.masks.index == row)
            allowed = batch.masks.allowed(int(sample), TOKENIZER.vocab_size)
            assert allowed is not None
            ids = np.flatnonzero(allowed).tolist()
            assert ids
            assert all(set(TOKENIZER.token_bytes(i)) <= set(b"abcdef") for i in ids)


def test_rows_beyond_the_tokenizer_are_never_drawn() -> None:
    """Embeddings are padded; the tokens of such rows stand for no text."""
    size = TOKENIZER.vocab_size + 37
    grammars = LLGrammars(make_tokenizer, size)
    engine = Engine(FakeExecutor(vocab_size=size), guides=Guides(grammars, size))
    requests = [ask(f"r{i}", regex_grammar("[0-9]{9}")) for i in range(5)]
    for text, reason in answers(engine, *requests).values():
        assert re.fullmatch("[0-9]{9}", text)
        assert reason == "stop"


def test_a_fill_that_fails_ends_its_requests_alone() -> None:
    grammars = LLGrammars(make_tokenizer, TOKENIZER.vocab_size)
    engine = Engine(
        FakeExecutor(vocab_size=2000), guides=Guides(grammars, 2000)
    )  # masks of another width than the vocabulary's
    engine.add(ask("guided", regex_grammar("a+")))
    engine.add(ask("free", None, 4, stop_ids=frozenset()))
    events = drain(engine)
    engine.close()
    assert "cannot be followed" in (events["guided"][-1].error or "")
    assert events["free"][-1].finish_reason == "length"


def test_a_model_without_an_end_is_refused() -> None:
    tokenizer = make_tokenizer()
    tokenizer.eos_ids = frozenset()
    with pytest.raises(RequestError, match="ends an answer"):
        read_vocabulary(tokenizer, tokenizer.vocab_size)


def test_blanks_are_bounded() -> None:
    """A model that only ever wants blanks must still come to an end."""
    grammar = json_schema_grammar({"type": "array", "items": {"type": "null"}, "maxItems": 2})
    text, reason = answers(make_engine("[" + " " * 400), ask("a", grammar, 400))["a"]
    assert reason == "stop"
    assert json.loads(text) in ([], [None], [None, None])
    assert len(text) < 100


def test_properties_come_in_the_order_of_the_schema() -> None:
    schema = {
        "type": "object",
        "properties": {name: {"type": "boolean"} for name in ("zebra", "apple", "mango")},
        "required": ["mango", "apple", "zebra"],
        "additionalProperties": False,
    }
    requests = [ask(f"r{i}", json_schema_grammar(schema), 400) for i in range(3)]
    for text, reason in answers(make_engine(), *requests).values():
        assert reason == "stop"
        assert list(json.loads(text)) == ["zebra", "apple", "mango"]
