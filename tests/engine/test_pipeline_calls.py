"""The offline API on the fake executor: forms of prompts, order, errors, streaming, what is freed."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from byte_model import make_engine, make_frontend
from responses import assert_idle, many, one

from lmdeploy.config import GenerationConfig
from lmdeploy.engine.batch import Batch
from lmdeploy.errors import EngineDeadError, EngineError, RequestError, UserError
from lmdeploy.messages import Response
from lmdeploy.pipeline import Pipeline

ANSWER = "Ein schönes 漢字."


def make(
    script: str | bytes = ANSWER + "$", *, session_len: int = 512, template: Any = "chatml", **engine: Any
) -> Pipeline:
    frontend = make_frontend(session_len) if template == "chatml" else make_frontend(session_len, template)
    return Pipeline(make_engine(script, **engine), frontend)


USER = {"role": "user", "content": "hi"}
ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


class TestForms:
    @pytest.mark.parametrize("prompt", ["hi", [USER]], ids=["text", "messages"])
    def test_single_prompt_gives_a_single_response(self, prompt: Any) -> None:
        pipe = make()
        response = one(pipe(prompt))
        assert (response.text, response.finish_reason, response.index) == (ANSWER, "stop", 0)
        assert response.input_token_len == len(pipe.frontend.chat_ids([USER]))
        assert response.generate_token_len == len(ANSWER.encode()) + 1
        assert response.token_ids == list(ANSWER.encode())
        assert response.error_code is None
        assert response.error_message is None

    def test_a_message_alone_is_a_conversation_of_one(self) -> None:
        response = one(make()(USER))
        assert response.input_token_len == one(make()([USER])).input_token_len

    def test_parts_and_roles_are_read_as_the_server_reads_them(self) -> None:
        parts = [{"role": "developer", "content": [{"type": "text", "text": "hi"}]}]
        plain = [{"role": "system", "content": "hi"}]
        assert one(make()(parts)).input_token_len == one(make()(plain)).input_token_len

    @pytest.mark.parametrize("prompts", [["hi"], [[USER]], ["hi", [USER], "ho"], []])
    def test_list_gives_a_list(self, prompts: Any) -> None:
        responses = many(make()(prompts))
        assert [r.index for r in responses] == list(range(len(prompts)))
        assert all(r.text == ANSWER for r in responses)

    def test_without_preprocessing_the_text_is_the_prompt(self) -> None:
        response = one(make()("<|im_start|>ab", do_preprocess=False))
        assert response.input_token_len == 3

    def test_model_without_template_takes_plain_text(self) -> None:
        pipe = make(template=None)
        assert one(pipe("abc")).input_token_len == 3
        refused = one(pipe([USER]))
        assert refused.finish_reason == "error"
        assert "chat template" in (refused.error_message or "")

    def test_one_config_for_each_prompt(self) -> None:
        configs = [GenerationConfig(max_new_tokens=n) for n in (1, 3, 2)]
        assert [r.text for r in many(make()(["a", "b", "c"], configs))] == ["E", "Ein", "Ei"]

    @pytest.mark.parametrize("configs", [[], [GenerationConfig()] * 3, [{"top_k": 1}] * 2])
    def test_configs_that_do_not_match_the_prompts(self, configs: Any) -> None:
        with pytest.raises(RequestError, match="gen_config"):
            make()(["a", "b"], configs)

    def test_template_arguments_reach_the_template(self) -> None:
        response = one(make()("hi", chat_template_kwargs={"add_generation_prompt": False}))
        full = one(make()("hi"))
        assert full.input_token_len - response.input_token_len == len("<|im_start|>assistant\n") - 11

    def test_progress_goes_to_standard_error(self, capsys: pytest.CaptureFixture[str]) -> None:
        make()(["a", "b"], use_tqdm=True)
        out, err = capsys.readouterr()
        assert out == ""
        assert "2/2" in err


class TestErrors:
    def test_one_bad_prompt_fails_alone(self) -> None:
        pipe = make(session_len=64)
        responses = many(pipe(["long " * 3, "a", "too long " * 20, "b", ("text", "image.png"), 5, []]))
        assert [r.index for r in responses] == list(range(7))
        assert [r.text for r in responses] == [ANSWER, ANSWER, "", ANSWER, "", "", ""]
        assert [r.finish_reason for r in responses] == ["stop", "stop", "error", "stop", *["error"] * 3]
        assert responses[2].error_code == "context_length_exceeded"
        assert (responses[2].error_message or "").startswith(
            "This model's maximum context length is 64 tokens."
        )
        assert "image" in (responses[4].error_message or "")
        assert_idle(pipe)

    @pytest.mark.parametrize(
        ("prompt", "words"),
        [
            ("\ud800", "messages[0].content is not valid text"),
            ([{"role": "user", "content": "a\udcff"}], "messages[0].content is not valid text: character 2"),
            ([{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}], "messages[0].content"),
            ([{"role": "user", "content": "a", "name": "\ud800"}], "messages[0].name is not valid text"),
            ([{"role": "user"}], "'messages[0].content'"),
            ([{"role": "user", "content": 5}], "'messages[0].content'"),
            ([{"role": "king", "content": "a"}], "'messages[0].role'"),
            ([USER, 5], "'messages[1]': must be an object"),
            ([], "at least one message"),
            ([{**USER, "more": ENDLESS}], "nested more than 128 deep"),
            (b"bytes", "not bytes"),
        ],
    )
    def test_what_is_no_prompt_fails_alone_and_is_named(self, prompt: Any, words: str) -> None:
        responses = many(make()(["ok", prompt]))
        assert [r.finish_reason for r in responses] == ["stop", "error"]
        assert words in (responses[1].error_message or "")

    @pytest.mark.parametrize("prompts", [b"hi", {"hi"}, None, 5, (x for x in "ab"), np.array(["hi"])])
    def test_what_holds_no_prompts_is_refused(self, prompts: Any) -> None:
        for call in (make(), make().stream_infer):
            with pytest.raises(RequestError, match="prompts must be a text"):
                call(prompts)

    def test_invalid_text_without_preprocessing_and_in_a_conversation(self) -> None:
        pipe = make()
        responses = many(pipe(["ok", "\ud800"], do_preprocess=False))
        assert [r.finish_reason for r in responses] == ["stop", "error"]
        session = pipe.chat("\ud800")
        assert "not valid text" in (session.response.error_message or "")  # type: ignore[union-attr]
        for wrong in (None, 5, b"x"):
            with pytest.raises(RequestError, match="a prompt is a text or a list of messages"):
                pipe.chat(wrong)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("kwargs", "param"),
        [
            (5, "chat_template_kwargs"),
            ({5: 1}, "chat_template_kwargs"),
            ({"messages": []}, "chat_template_kwargs.messages"),
            ({"tools": 5}, "chat_template_kwargs.tools"),
            ({"continue_final_message": 5}, "chat_template_kwargs.continue_final_message"),
            ({"x": ["\ud800"]}, "chat_template_kwargs.x[0]"),
        ],
    )
    def test_template_arguments_are_checked(self, kwargs: Any, param: str) -> None:
        with pytest.raises(RequestError) as caught:
            make()("hi", chat_template_kwargs=kwargs)
        assert caught.value.param == param

    def test_single_bad_prompt_does_not_raise(self) -> None:
        response = one(make(session_len=64)("too long " * 20))
        assert (response.finish_reason, response.error_code) == ("error", "context_length_exceeded")

    def test_engine_refusal_is_an_error_response(self) -> None:
        """A prompt that the session allows and the cache cannot hold."""
        pipe = make(session_len=512, num_blocks=4)
        responses = many(pipe(["x" * 100, "a"], GenerationConfig(max_new_tokens=3)))
        assert [r.finish_reason for r in responses] == ["error", "length"]
        assert "cache" in (responses[0].error_message or "")
        assert responses[0].error_code == "context_length_exceeded"

    def test_non_finite_logits_end_only_their_request(self) -> None:
        responses = many(make(b"", poison_id=ord("!"))(["a", "b!", "c"], GenerationConfig(max_new_tokens=4)))
        assert [r.finish_reason for r in responses] == ["length", "error", "length"]
        assert responses[1].error_message
        assert responses[1].error_code == "internal_error"

    @pytest.mark.parametrize(
        ("call", "words"),
        [
            (lambda p: p("a", adapter_name="lora"), "adapter_name"),
            (lambda p: p.stream_infer("a", adapter_name="lora"), "adapter_name"),
            (lambda p: p.get_reward_score([1, 2]), "reward"),
            (lambda p: p.batch_infer(["a"]), r"pipe\(\["),
            (lambda p: p.generate("a"), "stream_infer"),
            (lambda p: p.get_ppl([1]), "two"),
            (lambda p: p("a", 5), "gen_config must be .* of type int"),
            (lambda p: p.stream_infer("a", 5), "sessions must be made by"),
            (lambda p: p.chat("a", 5), "session must be made by"),
            (lambda p: p.get_ppl(None), "input_ids must be"),
            (lambda p: p.get_ppl("ab"), "input_ids must be"),
            (lambda p: p.get_ppl([1.5, 2.5]), "input_ids must be"),
            (lambda p: p.get_ppl([1, 2.5]), "2.5 is no token id"),
            (lambda p: p.get_ppl([[True, False]]), "true is no token id"),
            (lambda p: p.get_ppl([1] * 600), r"600 tokens. Please shorten it\.$"),
        ],
    )
    def test_refused_by_name(self, call: Callable[[Pipeline], object], words: str) -> None:
        with pytest.raises(UserError, match=words):
            call(make())

    def test_closed_pipeline(self) -> None:
        with make() as pipe:
            pipe("a")
            pipe.close()
        pipe.close()
        with pytest.raises(EngineDeadError, match="closed"):
            pipe("a")


class TestStream:
    @pytest.mark.parametrize("stop", [None, ["漢字"], ["s 漢"]])
    def test_joined_pieces_are_the_whole(self, stop: list[str] | None) -> None:
        pipe, config = make(), GenerationConfig(stop_words=stop, logprobs=2, output_logits="generation")
        prompts = ["a", "b", "c"]
        whole = many(pipe(prompts, config))
        joined = [Response() for _ in prompts]
        ends = [0] * 3
        for piece in pipe.stream_infer(prompts, gen_config=config):
            joined[piece.index].extend(piece)
            ends[piece.index] += piece.finish_reason is not None
            assert piece.text or piece.token_ids or piece.finish_reason
        assert ends == [1, 1, 1]
        for a, b in zip(whole, joined, strict=True):
            b.cached_tokens = a.cached_tokens
            np.testing.assert_array_equal(a.logits, b.logits)
            a.logits = b.logits = None
            assert a == b

    def test_stop_word_ends_the_engine_request(self) -> None:
        pipe = make(ANSWER)
        response = one(pipe("a", GenerationConfig(stop_words=["漢字"], max_new_tokens=300)))
        assert (response.text, response.finish_reason) == ("Ein schönes ", "stop")
        assert_idle(pipe)

    def test_whole_answers(self) -> None:
        got = list(make().stream_infer(["a", "b"], stream_response=False))
        assert sorted((r.index, r.text) for r in got) == [(0, ANSWER), (1, ANSWER)]

    def test_leaving_a_stream_frees_everything(self) -> None:
        pipe = make(b"")
        stream = pipe.stream_infer(["a", "b"], gen_config=GenerationConfig(max_new_tokens=400))
        next(stream)
        assert pipe.stats().blocks_held > 0
        del stream
        gc.collect()
        assert_idle(pipe)

    def test_stream_that_is_never_read_starts_nothing(self) -> None:
        pipe = make()
        pipe.stream_infer("a")
        assert_idle(pipe)

    def test_two_streams_side_by_side(self) -> None:
        pipe = make()
        a, b = pipe.stream_infer("a"), pipe.stream_infer("b")
        texts = ["", ""]
        for x, y in zip(a, b, strict=True):
            texts[0] += x.text
            texts[1] += y.text
        assert texts == [ANSWER, ANSWER]

    def test_call_while_a_stream_is_half_read(self) -> None:
        pipe = make()
        stream = pipe.stream_infer("a")
        head = next(stream).text
        assert one(pipe("b")).text == ANSWER
        assert head + "".join(r.text for r in stream) == ANSWER

    def test_handle_aborts_one_of_two(self) -> None:
        pipe = make(b"")
        handles = [pipe.session(), pipe.session()]
        config = GenerationConfig(max_new_tokens=60, ignore_eos=True)
        ends = {}
        for piece in pipe.stream_infer(["a", "b"], handles, config):
            handles[0].abort()
            if piece.finish_reason is not None:
                ends[piece.index] = piece.finish_reason
        assert ends == {0: "abort", 1: "length"}
        assert_idle(pipe)

    def test_number_of_handles(self) -> None:
        pipe = make()
        with pytest.raises(RequestError, match="sessions"):
            pipe.stream_infer(["a", "b"], [pipe.session()])


class TestFields:
    def test_logprobs_belong_to_the_tokens(self) -> None:
        response = one(make()("a", GenerationConfig(logprobs=3)))
        assert response.logprobs is not None
        assert len(response.logprobs) == len(response.token_ids)
        for token, values in zip(response.token_ids, response.logprobs, strict=True):
            assert token in values
            assert 3 <= len(values) <= 4

    def test_logits_belong_to_the_tokens(self) -> None:
        response = one(make()("a", GenerationConfig(output_logits="generation", logprobs=0)))
        assert response.logits is not None and response.logprobs is not None
        assert response.logits.shape == (len(response.token_ids), 263)
        chosen = [row[token] for row, token in zip(response.logits, response.token_ids, strict=True)]
        assert chosen == [values[t] for values, t in zip(response.logprobs, response.token_ids, strict=True)]

    def test_without_asking_there_are_none(self) -> None:
        response = one(make()("a"))
        assert (response.logprobs, response.logits) == (None, None)

    def test_large_max_new_tokens_is_cut_to_the_room(self) -> None:
        response = one(
            make(b"", session_len=128)("a", GenerationConfig(max_new_tokens=4096, ignore_eos=True))
        )
        assert response.finish_reason == "length"
        assert response.input_token_len + response.generate_token_len == 128

    def test_prefix_cache_is_reported(self) -> None:
        pipe = make()
        prompt = "x" * 64
        assert one(pipe(prompt)).cached_tokens == 0
        assert one(pipe(prompt)).cached_tokens >= 64

    def test_seeds(self) -> None:
        """The same ids alone and beside seven unseeded neighbours."""
        config = GenerationConfig(temperature=0.8, random_seed=42, max_new_tokens=40, ignore_eos=True)
        free = GenerationConfig(temperature=0.8, max_new_tokens=40, ignore_eos=True)
        alone = one(make(b"")("a", config))
        for _ in range(3):
            beside = many(make(b"")(["a", *"bcdefgh"], [config, *[free] * 7]))
            assert beside[0].token_ids == alone.token_ids
        others = {tuple(one(make(b"")("a", free)).token_ids) for _ in range(3)}
        assert len(others) == 3


class TestPerplexity:
    def test_mean_of_the_tokens_scores(self) -> None:
        pipe = make()
        ids = list(range(1, 60))
        value = pipe.get_ppl(ids)
        request = pipe.frontend.scoring("r", ids)
        engine = make_engine()
        engine.add(request)
        events = []
        while engine.has_work:
            events += engine.step()
        scores = [x.logprob for e in events for x in e.prompt_logprobs]
        assert len(scores) == 58
        assert value == pytest.approx(-np.mean(scores))

    def test_several_sequences_and_the_prefix_cache(self) -> None:
        pipe = make()
        ids = [list(range(1, 100)), list(range(1, 50)), list(range(5, 100))]
        first = pipe.get_ppl(ids)
        assert pipe.get_ppl(ids) == first
        assert pipe.get_ppl(ids[1]) == first[1]  # type: ignore[index]
        assert len(set(first)) == 3  # type: ignore[arg-type]
        assert_idle(pipe)

    def test_sequence_that_fills_the_context(self) -> None:
        assert isinstance(make(session_len=64).get_ppl([1] * 64), float)


def test_threads_share_one_engine() -> None:
    pipe = make(b"")
    config = GenerationConfig(max_new_tokens=30, ignore_eos=True)
    alone = {p: one(make(b"")(p, config)).text for p in "abcdefgh"}
    got: dict[str, str] = {}

    def ask(prompt: str) -> None:
        got[prompt] = one(pipe(prompt, config)).text

    threads = [threading.Thread(target=ask, args=(p,)) for p in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == alone
    assert_idle(pipe)


def test_abort_from_inside_a_step() -> None:
    """The garbage collector may close a stream at any moment, also while this thread is in the engine."""
    pipe: Pipeline
    streams: list[Any] = []

    def on_step(_batch: Batch) -> None:
        if streams:
            streams.pop().close()

    pipe = make(b"", on_step=on_step)
    config = GenerationConfig(max_new_tokens=40, ignore_eos=True)
    abandoned = pipe.stream_infer("a", gen_config=config)
    next(abandoned)
    streams.append(abandoned)
    assert one(pipe("b", config)).generate_token_len == 40
    assert_idle(pipe)


def test_engine_failure_of_one_step() -> None:
    """What an executor cannot compute ends the requests of that step; the next call answers."""
    steps = 0

    def on_step(_batch: Batch) -> None:
        nonlocal steps
        steps += 1
        if steps == 3:
            raise EngineError("out of luck")

    pipe = make(b"", on_step=on_step)
    config = GenerationConfig(max_new_tokens=5, ignore_eos=True)
    failed = one(pipe("a", config))
    assert (failed.finish_reason, failed.error_message) == ("error", "out of luck")
    assert one(pipe("a", config)).finish_reason == "length"


def test_interrupted_call_leaves_a_pipeline_that_works() -> None:
    """Ctrl-C is raised where the native call returns to Python: the step then counts as not done."""
    steps = 0

    def on_step(_batch: Batch) -> None:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise KeyboardInterrupt

    pipe = make(b"", on_step=on_step)
    config = GenerationConfig(max_new_tokens=20, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        pipe(["a", "b"], config)
    assert_idle(pipe)
    assert one(pipe("a", config)).text == one(make(b"")("a", config)).text


def test_memory_does_not_grow_with_the_number_of_requests() -> None:
    """After a warm-up, 600 different requests with log-probabilities leave nothing behind."""
    pipe = make(b"")
    config = GenerationConfig(max_new_tokens=2, ignore_eos=True, logprobs=3)

    def ask(first: int, count: int) -> None:
        for i in range(first, first + count, 10):
            many(pipe([f"question {i + k}" for k in range(10)], config))

    ask(0, 300)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    ask(300, 600)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 100_000
