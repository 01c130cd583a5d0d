"""Messages to requests and events to text, on a vocabulary of bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from byte_model import CONTROL, make_frontend
from hypothesis import given
from hypothesis import strategies as st

from lmdeploy.config import GenerationConfig
from lmdeploy.engine.request import FinishReason, Request, TokenEvent, TokenLogprobs
from lmdeploy.errors import ContextLengthError, RequestError
from lmdeploy.runtime.generate import Choice, Delta, Frontend

FRONTEND = make_frontend()
END = FRONTEND.tokenizer.id_of("<|im_end|>")
assert END is not None


def request(ids: Iterable[int] = b"hello", frontend: Frontend = FRONTEND, **fields: Any) -> Request:
    return frontend.request("r", list(ids), GenerationConfig(**fields))


class TestRequest:
    def test_answer_is_cut_to_the_room(self) -> None:
        frontend = make_frontend(session_len=512)
        assert request(bytes(100), frontend, max_new_tokens=4096).max_new_tokens == 412
        assert request(bytes(100), frontend, max_new_tokens=None).max_new_tokens == 412
        assert request(bytes(100), frontend, max_new_tokens=7).max_new_tokens == 7

    @pytest.mark.parametrize("length", [512, 600])
    def test_long_prompt_is_refused(self, length: int) -> None:
        """Also one that fills the context, as no token could follow."""
        with pytest.raises(ContextLengthError) as caught:
            FRONTEND.request("r", [1] * length, GenerationConfig(), param="messages")
        expected = (
            f"This model's maximum context length is 512 tokens. However, your messages resulted in {length}"
        )
        assert caught.value.message.startswith(expected + " tokens. ")
        assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")

    def test_prompt_of_all_but_one_token(self) -> None:
        assert request([1] * 511).max_new_tokens == 1

    def test_empty_prompt_is_refused(self) -> None:
        with pytest.raises(RequestError, match="empty"):
            request([])

    @pytest.mark.parametrize("token", [-1, 263, 10**9])
    def test_prompt_id_outside_the_vocabulary(self, token: int) -> None:
        assert FRONTEND.vocab_size == 263
        with pytest.raises(RequestError, match=str(token)):
            request([5, token, 5])

    def test_stop_ids(self) -> None:
        assert request().stop_ids == {END}
        assert request(stop_token_ids=[7, 8]).stop_ids == {END, 7, 8}
        assert request(stop_token_ids=[7], ignore_eos=True).stop_ids == {7}
        with pytest.raises(RequestError, match="stop_token_ids"):
            request(stop_token_ids=[263])

    def test_control_token_as_stop_word(self) -> None:
        """Its text is never printed, so the id is the stop."""
        end = FRONTEND.tokenizer.id_of("</s>")
        assert request(stop_words=["</s>", "x"], ignore_eos=True).stop_ids == {end}

    def test_stop_words_of_the_template(self) -> None:
        frontend = make_frontend(stop_words=["</s>", "User:"])
        assert request(frontend=frontend).stop_ids == {END, frontend.tokenizer.id_of("</s>")}
        choice = Choice(frontend, GenerationConfig())
        assert choice.feed(TokenEvent("r", tuple(b"hi User: "))).text == "hi "

    def test_min_new_tokens(self) -> None:
        assert request(min_new_tokens=5).min_new_tokens == 5
        assert request([1] * 510, min_new_tokens=5).min_new_tokens == 2

    def test_bad_words_ban_each_whole_token(self) -> None:
        bad, spaced = FRONTEND.tokenizer.id_of("bad"), FRONTEND.tokenizer.id_of("Ġbad")
        assert request(bad_words=["bad"]).sampling.logit_bias == ((spaced, -math.inf), (bad, -math.inf))
        assert request(bad_words=[" bad"]).sampling.logit_bias == ((spaced, -math.inf),)
        assert request(bad_token_ids=[3]).sampling.logit_bias == ((3, -math.inf),)

    def test_bad_word_of_several_tokens_is_refused(self) -> None:
        with pytest.raises(RequestError, match="terrible") as caught:
            request(bad_words=["terrible"])
        assert caught.value.param == "bad_words"

    def test_logits_and_salt(self) -> None:
        made = FRONTEND.request("r", [1], GenerationConfig(output_logits="generation"), cache_salt="s")
        assert (made.want_logits, made.cache_salt) == (True, "s")

    def test_scoring_may_fill_the_context(self) -> None:
        made = FRONTEND.scoring("r", [1] * 512, top=2)
        assert (made.max_new_tokens, made.prompt_logprobs) == (0, 2)
        with pytest.raises(ContextLengthError):
            FRONTEND.scoring("r", [1] * 513)


class TestPrompts:
    def test_chat_ids_hold_the_template(self) -> None:
        ids = FRONTEND.chat_ids([{"role": "user", "content": "hi"}])
        assert FRONTEND.tokenizer.decode(ids, skip_special_tokens=False) == (
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        )
        assert ids.count(END) == 1

    def test_user_text_never_becomes_a_control_token(self) -> None:
        ids = FRONTEND.chat_ids([{"role": "user", "content": "<|im_end|>"}])
        assert ids.count(END) == 1

    def test_plain_prompt_may_hold_control_tokens(self) -> None:
        assert END in FRONTEND.prompt_ids("a<|im_end|>")


def event(
    ids: Iterable[int] = (),
    finish: FinishReason | None = None,
    stop_id: int | None = None,
    scored: bool = True,
) -> TokenEvent:
    tokens = tuple(ids)
    logprobs = tuple(TokenLogprobs(i, -0.5) for i in tokens) if scored else ()
    return TokenEvent("r", tokens, logprobs, finish_reason=finish, stop_id=stop_id)


def play(
    ids: list[int], cuts: Iterable[int], last: dict[str, Any], **fields: Any
) -> tuple[Choice, list[Delta]]:
    """Feed `ids` in pieces that end at `cuts`; the last event finishes as `last` says."""
    choice = Choice(FRONTEND, GenerationConfig(**fields))
    ends = sorted({c for c in cuts if 0 < c < len(ids)})
    starts = [0, *ends]
    pieces = [ids[a:b] for a, b in zip(starts, [*ends, len(ids)], strict=True)]
    deltas = [choice.feed(event(piece)) for piece in pieces[:-1]]
    deltas.append(choice.feed(event(pieces[-1], **last)))
    return choice, deltas


def joined(deltas: list[Delta]) -> tuple[Any, ...]:
    ends = [d for d in deltas if d.finish_reason is not None]
    assert len(ends) == 1
    return (
        "".join(d.text for d in deltas),
        [i for d in deltas for i in d.token_ids],
        [p.token_id for d in deltas for p in d.logprobs],
        ends[0].finish_reason,
        ends[0].stop_reason,
        ends[0].silent_stop,
    )


ANSWER = "Ein schönes 漢字 und 👩‍👩‍👧 am  Ende."
TEXTS = st.text(st.sampled_from("abcé漢👩 "), max_size=24)
CUTS = st.sets(st.integers(1, 120))
STOPS = st.lists(st.text(st.sampled_from("abcé漢"), min_size=1, max_size=4), max_size=3)


class TestChoice:
    @given(text=TEXTS, stops=STOPS, cuts=CUTS, include=st.booleans(), least=st.integers(0, 6))
    def test_every_chunking_gives_the_same(
        self, text: str, stops: list[str], cuts: set[int], include: bool, least: int
    ) -> None:
        ids = [*text.encode(), END]
        last = {"finish": "stop", "stop_id": END}
        fields = {"stop_words": stops, "include_stop_str_in_output": include, "min_new_tokens": least}
        whole = joined(play(ids, (), last, **fields)[1])
        assert joined(play(ids, cuts, last, **fields)[1]) == whole
        assert joined(play(ids, range(len(ids)), last, **fields)[1]) == whole

    @given(text=TEXTS, stops=STOPS, cuts=CUTS)
    def test_text_ends_before_the_first_complete_stop_word(
        self, text: str, stops: list[str], cuts: set[int]
    ) -> None:
        """The oracle searches the whole text: the stop that is complete first, and of those the longest."""
        found = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
        expected = text[: min(found)[1]] if found else text
        got = joined(
            play([*text.encode(), END], cuts, {"finish": "stop", "stop_id": END}, stop_words=stops)[1]
        )
        assert got[0] == expected
        assert got[4] == (min(found)[2] if found else None)

    @given(text=TEXTS, stops=STOPS, cuts=CUTS)
    def test_tokens_belong_to_the_released_text(self, text: str, stops: list[str], cuts: set[int]) -> None:
        _, deltas = play(list(text.encode()), cuts, {"finish": "length"}, stop_words=stops)
        so_far_text, so_far_ids = "", b""
        for delta in deltas:
            so_far_text += delta.text
            so_far_ids += bytes(delta.token_ids)
            assert so_far_ids == so_far_text.encode()
            assert [p.token_id for p in delta.logprobs] == list(delta.token_ids)

    @given(cuts=CUTS)
    def test_characters_of_several_tokens_stay_whole(self, cuts: set[int]) -> None:
        _, deltas = play(list(ANSWER.encode()), cuts, {"finish": "length"})
        assert "".join(d.text for d in deltas) == ANSWER
        assert not any("�" in d.text for d in deltas)

    def test_stop_word_over_several_tokens(self) -> None:
        stop = ANSWER[10:18]
        choice, deltas = play(list(ANSWER.encode()), range(100), {"finish": "length"}, stop_words=[stop])
        assert joined(deltas)[0] == ANSWER[:10]
        assert joined(deltas)[3:5] == ("stop", stop)
        assert choice.matched == stop
        assert choice.finished
        assert choice.generated == len(ANSWER[:18].encode())

    def test_held_back_text_is_released_as_soon_as_it_cannot_match(self) -> None:
        choice = Choice(FRONTEND, GenerationConfig(stop_words=["abc"]))
        texts = [choice.feed(event([b])).text for b in b"xababd"]
        assert texts == ["x", "", "", "ab", "", "abd"]

    def test_held_back_text_comes_out_at_the_end(self) -> None:
        _, deltas = play(list(b"xab"), (1, 2), {"finish": "length"}, stop_words=["abc"])
        assert [d.text for d in deltas] == ["x", "", "ab"]
        assert deltas[-1].token_ids == tuple(b"ab")

    def test_nothing_after_the_end(self) -> None:
        choice = Choice(FRONTEND, GenerationConfig(stop_words=["b"]))
        assert choice.feed(event(b"abc")).text == "a"
        assert choice.feed(event(b"def")) == Delta()
        assert choice.feed(event((), "abort")) == Delta()

    def test_surplus_tokens_behind_a_stop_word_are_not_counted(self) -> None:
        choice = Choice(FRONTEND, GenerationConfig(stop_words=["b"]))
        choice.feed(event(b"abcdef"))
        assert choice.generated == 2

    def test_end_token_is_counted_and_not_printed(self) -> None:
        choice, deltas = play(
            [*b"hi", END], (), {"finish": "stop", "stop_id": END}, skip_special_tokens=False
        )
        assert joined(deltas) == ("hi", [*b"hi", END], [*b"hi", END], "stop", None, END)
        assert choice.generated == 3

    def test_stop_reason_names_the_callers_id(self) -> None:
        _, deltas = play(list(b"hi!"), (), {"finish": "stop", "stop_id": 33}, stop_token_ids=[33])
        assert joined(deltas)[0] == "hi"
        assert joined(deltas)[3:] == ("stop", 33, 33)

    @pytest.mark.parametrize(("include", "text"), [(False, "hi"), (True, "hi</s>")])
    def test_control_token_as_stop_word(self, include: bool, text: str) -> None:
        end = FRONTEND.tokenizer.id_of("</s>")
        fields = {"stop_words": ["</s>"], "include_stop_str_in_output": include}
        _, deltas = play([*b"hi", end], (), {"finish": "stop", "stop_id": end}, **fields)
        assert joined(deltas)[0] == text
        assert joined(deltas)[4] == "</s>"

    def test_stop_word_before_min_new_tokens_is_text(self) -> None:
        _, deltas = play(list(b"xaxbxc"), (), {"finish": "length"}, stop_words=["x"], min_new_tokens=3)
        assert joined(deltas)[0] == "xaxb"

    def test_special_tokens_are_left_out_or_kept(self) -> None:
        ids = [*b"a", FRONTEND.tokenizer.id_of(CONTROL[0]), *b"b"]
        assert joined(play(ids, (), {"finish": "length"})[1])[:2] == ("ab", ids)
        kept = joined(play(ids, (), {"finish": "length"}, skip_special_tokens=False)[1])
        assert kept[:2] == ("a<s>b", ids)

    def test_unfinished_character_at_the_end(self) -> None:
        _, deltas = play(list("é".encode()[:1]), (), {"finish": "length"})
        assert joined(deltas)[:2] == ("�", [0xC3])

    @pytest.mark.parametrize("reason", ["abort", "error"])
    def test_text_before_an_abort_or_error_is_delivered(self, reason: FinishReason) -> None:
        choice = Choice(FRONTEND, GenerationConfig(stop_words=["abc"]))
        assert choice.feed(event(b"xab")).text == "x"
        last = choice.feed(event((), reason))
        assert (last.text, last.finish_reason, last.token_ids) == ("ab", reason, tuple(b"ab"))

    def test_logprobs_only_when_asked(self) -> None:
        choice = Choice(FRONTEND, GenerationConfig())
        delta = choice.feed(event(b"a", scored=False))
        assert (delta.token_ids, delta.logprobs) == (tuple(b"a"), ())


def test_prompt_array_is_what_the_engine_wants() -> None:
    assert request(b"abc").prompt_ids.dtype == np.int32
