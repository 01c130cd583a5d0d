"""Between people and the engine: messages or text -> engine request, engine events -> text.

`Frontend` holds what all requests to one model share; `Choice` turns the events of one request into text.
Used by the pipeline, the terminal chat and the server. Knows neither a wire format nor how the engine is
driven.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lmdeploy.config import ChatTemplateConfig, GenerationConfig
from lmdeploy.engine.request import FinishReason, Grammar, Request, TokenEvent, TokenLogprobs
from lmdeploy.errors import ContextLengthError, RequestError
from lmdeploy.runtime.sampling import check_ids, model_defaults, resolve_sampling
from lmdeploy.runtime.structured import response_grammar
from lmdeploy.text.chat_template import ChatTemplate, load_chat_template
from lmdeploy.text.detokenize import Detokenizer
from lmdeploy.text.stop_strings import StopStrings
from lmdeploy.text.tokenizer import Tokenizer, load_tokenizer

REPETITION = "repetition"  # stop_reason of an answer that ended because it repeated itself


class Frontend:
    """Tokenizer, chat template, limits and sampling defaults of one served model.

    `session_len` and `vocab_size` are in tokens. `sampling_defaults` (temperature, top_p, top_k, min_p,
    repetition_penalty) stand where a caller is silent: the model's generation_config over the defaults of the
    interface that is speaking.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate,
        *,
        session_len: int,
        vocab_size: int,
        sampling_defaults: Mapping[str, float] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.session_len = session_len
        self.vocab_size = vocab_size
        self.sampling_defaults = dict(sampling_defaults or {})
        self._words: dict[bytes, list[int]] | None = None

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> list[int]:
        """Prompt ids of a conversation; `template` goes to `ChatTemplate.encode`.

        Both come from `chat_input`, which checks what callers give. Raises RequestError.
        """
        return self.chat_template.encode(messages, **template)

    def prompt_ids(self, text: str) -> list[int]:
        """Prompt ids of a plain text with the tokenizer's own markers; control tokens in it count as such.

        Raises RequestError when the text cannot be written as UTF-8.
        """
        return self.tokenizer.encode(text, add_special_tokens=True, parse_special=True)

    def request(
        self,
        request_id: str,
        ids: Sequence[int],
        config: GenerationConfig,
        *,
        param: str = "prompt",
        choice: int = 0,
        cache_salt: str = "",
        prompt_logprobs: int | None = None,
        streams: bool = False,
        grammar: Grammar | None = None,
        priority: int = 0,
        account: str = "",
    ) -> Request:
        """The engine's request for `ids`, with everything that depends on the model checked.

        `param` names the field that held the prompt, for error messages; `choice` numbers the answers to one
        prompt; `grammar` stands before the config's response_format; requests of a smaller `priority` go
        first, and those of different accounts take turns. Raises ContextLengthError when the prompt leaves no
        room for an answer, and RequestError.
        """
        room = self._room(ids, param, least=1)
        stop_ids = self.stop_ids(config)
        _check_allowed(config, stop_ids)
        wanted = config.max_new_tokens if config.max_new_tokens is not None else room
        return Request(
            request_id=request_id,
            prompt_ids=np.asarray(ids, dtype=np.int32),
            max_new_tokens=min(wanted, room),
            sampling=resolve_sampling(
                config,
                self.sampling_defaults,
                vocab_size=self.vocab_size,
                banned=self._banned(config),
                choice=choice,
            ),
            stop_ids=stop_ids,
            min_new_tokens=min(config.min_new_tokens or 0, room),
            cache_salt=cache_salt,
            prompt_logprobs=prompt_logprobs,
            repetition=_repetition(config),
            want_logits=config.output_logits is not None,
            streams=streams,
            priority=priority,
            account=account,
            grammar=grammar or response_grammar(config.response_format),
        )

    def scoring(self, request_id: str, ids: Sequence[int], *, param: str = "prompt", top: int = 0) -> Request:
        """A request that only scores: log-probabilities of the prompt's tokens and of the `top` likeliest.

        Its one event holds them for positions 1 to n - 1. Raises as `request` does.
        """
        self._room(ids, param, least=0)
        prompt = np.asarray(ids, dtype=np.int32)
        return Request(request_id, prompt, max_new_tokens=0, prompt_logprobs=top)

    def _room(self, ids: Sequence[int], param: str, least: int) -> int:
        if len(ids) == 0:
            made = (
                "the chat template makes nothing of them" if param.startswith("messages") else "it is empty"
            )
            raise RequestError(f"{param}: no token to continue from, as {made}", param=param)
        check_ids((min(ids), max(ids)), self.vocab_size, param)
        room = self.session_len - len(ids)
        if room < least:
            reason = ": the answer needs room too" if least else ""
            noun, verb = ("messages", "them") if param.startswith("messages") else ("prompt", "it")
            raise ContextLengthError(
                f"This model's maximum context length is {self.session_len} tokens. However, your {noun} "
                f"resulted in {len(ids)} tokens. Please shorten {verb}{reason}.",
                param=param,
            )
        return room

    def stop_ids(self, config: GenerationConfig) -> frozenset[int]:
        """Ids that end the answer: the model's unless ignored, and the caller's with `control_stops`."""
        own = frozenset(config.stop_token_ids or ())
        check_ids(own, self.vocab_size, "stop_token_ids")
        model = frozenset() if config.ignore_eos else self.tokenizer.eos_ids
        return own | model | frozenset(self.control_stops(config))

    def stop_words(self, config: GenerationConfig) -> tuple[str, ...]:
        """The caller's and those of the chat template."""
        return (*(config.stop_words or ()), *self.chat_template.stop_words)

    def control_stops(self, config: GenerationConfig) -> dict[int, str]:
        """Stop words that are the text of a control token, by its id: never printed, so matched as ids."""
        found = {self.tokenizer.id_of(word): word for word in self.stop_words(config)}
        return {i: word for i, word in found.items() if i is not None and i in self.tokenizer.special_ids}

    def _banned(self, config: GenerationConfig) -> set[int]:
        banned = set(config.bad_token_ids or ())
        check_ids(banned, self.vocab_size, "bad_token_ids")
        for word in config.bad_words or ():
            banned.update(self._ids_of_word(word))
        return banned

    def _ids_of_word(self, word: str) -> list[int]:
        """Every id whose whole text is the word, with or without a space before it."""
        if self._words is None:
            self._words = self._vocabulary_by_text()
        text = word.encode()
        ids = self._words.get(text, []) + ([] if text[:1] == b" " else self._words.get(b" " + text, []))
        if not ids:
            raise RequestError(
                f"bad_words: {word[:80]!r} is not a single token of this model, so it cannot be banned",
                param="bad_words",
            )
        return ids

    def _vocabulary_by_text(self) -> dict[bytes, list[int]]:
        words: dict[bytes, list[int]] = {}
        for token_id in range(min(self.vocab_size, self.tokenizer.vocab_size)):
            words.setdefault(self.tokenizer.token_bytes(token_id), []).append(token_id)
        return words


def _check_allowed(config: GenerationConfig, stop_ids: frozenset[int]) -> None:
    """Something must be left while what ends the answer is banned."""
    allowed = config.allowed_token_ids
    if allowed is not None and config.min_new_tokens and stop_ids.issuperset(allowed):
        raise RequestError(
            "allowed_token_ids are all such that end the answer, which min_tokens forbids",
            param="allowed_token_ids",
        )


def _repetition(config: GenerationConfig) -> tuple[int, int] | None:
    n, times = config.repetition_ngram_size, config.repetition_ngram_threshold
    return (n, times) if n and times else None


@dataclass(frozen=True, slots=True)
class Delta:
    """What became certain with one event. Joined over a choice, `text` is the answer.

    `token_ids` and `logprobs` (parallel when asked for) are the tokens whose text this delta releases. A last
    token that prints nothing because it ended the answer is among them and named by `silent_stop`.
    `stop_reason` is the caller's stop word or stop id that matched, or REPETITION; None when the model itself
    ended.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    silent_stop: int | None = None


@dataclass(slots=True)
class _Held:
    """A token whose text is not out yet; `start` is its first character's place in the decoded text."""

    token_id: int
    logprob: TokenLogprobs | None
    start: int


@dataclass(slots=True)
class _Released:
    text: list[str] = field(default_factory=list)
    tokens: list[_Held] = field(default_factory=list)


class Choice:
    """Text of one answer, fed with its events in order; how tokens are cut into events does not matter.

    printed: control tokens that are text whatever `skip_special_tokens` says.
    """

    def __init__(
        self, frontend: Frontend, config: GenerationConfig, printed: frozenset[int] = frozenset()
    ) -> None:
        self.finished = False
        self.generated = 0  # tokens the engine produced for this answer, the one that ended it included
        self._config = config
        self._control_stops = frontend.control_stops(config)
        words = [w for w in frontend.stop_words(config) if w not in self._control_stops.values()]
        self._detokenizer = Detokenizer(frontend.tokenizer, config.skip_special_tokens, printed)
        self._stops = StopStrings(words, config.include_stop_str_in_output) if words else None
        self._decoded = 0  # characters decoded so far
        self._out = 0  # characters released so far
        self._held: list[_Held] = []

    @property
    def matched(self) -> str | None:
        """The stop word found in the text. The engine does not know of it: its request must be aborted."""
        return self._stops.matched if self._stops else None

    def feed(self, event: TokenEvent) -> Delta:
        """Text released by this event. After the end every event gives an empty delta."""
        if self.finished:
            return Delta()
        out = _Released()
        for index, token_id in enumerate(event.token_ids):
            self._take(token_id, event.logprobs[index] if event.logprobs else None, event, out)
            if self.matched is not None:
                return self._end(out, "stop", self.matched, None)
        if event.finish_reason is None:
            return _delta(out)
        self._flush(out)
        if self.matched is not None:
            return self._end(out, "stop", self.matched, None)
        return self._finish(event, out)

    def _take(self, token_id: int, logprob: TokenLogprobs | None, event: TokenEvent, out: _Released) -> None:
        self.generated += 1
        self._held.append(_Held(token_id, logprob, self._decoded))
        if token_id != event.stop_id:
            self._print(self._detokenizer.feed([token_id]), out)
        elif self._config.include_stop_str_in_output:
            word = self._control_stops.get(token_id)
            pieces = [self._detokenizer.finish(), word] if word else [self._detokenizer.feed([token_id])]
            self._print("".join(pieces), out)

    def _print(self, piece: str, out: _Released) -> None:
        if not piece:
            return
        self._decoded += len(piece)
        checked = self._stops is not None and self.generated > (self._config.min_new_tokens or 0)
        released = self._stops.feed(piece) if self._stops is not None and checked else piece
        self._release(released, out)

    def _release(self, text: str, out: _Released) -> None:
        out.text.append(text)
        self._out += len(text)
        if self._out == self._decoded:
            out.tokens += self._held
            self._held.clear()
            return
        # A token is out when a later one begins behind it in released text; tokens that gave no text of their
        # own (parts of a character) share the start of the one that completes it and leave with it.
        border = max((h.start for h in self._held if h.start <= self._out), default=0)
        done = sum(h.start < border for h in self._held)
        out.tokens += self._held[:done]
        del self._held[:done]

    def _flush(self, out: _Released) -> None:
        self._print(self._detokenizer.finish(), out)
        if self._stops is not None and self._stops.matched is None:
            self._release(self._stops.finish(), out)

    def _finish(self, event: TokenEvent, out: _Released) -> Delta:
        reason = event.finish_reason
        assert reason is not None
        stop: str | int | None = None
        if reason == "stop" and event.stop_id is not None:
            own = event.stop_id in (self._config.stop_token_ids or ())
            stop = self._control_stops.get(event.stop_id, event.stop_id if own else None)
        elif reason == "stop":
            stop = REPETITION
        silent = None if self._config.include_stop_str_in_output else event.stop_id
        return self._end(out, reason, stop, silent)

    def _end(
        self, out: _Released, reason: FinishReason, stop: str | int | None, silent_stop: int | None
    ) -> Delta:
        self.finished = True
        # Of the tokens still held those that gave released text belong to the answer; a stop word's do not.
        whole = self.matched is None
        out.tokens += [h for h in self._held if whole or h.start < self._out]
        self._held.clear()
        return _delta(out, reason, stop, silent_stop)


def _delta(
    out: _Released,
    reason: FinishReason | None = None,
    stop: str | int | None = None,
    silent_stop: int | None = None,
) -> Delta:
    return Delta(
        text="".join(out.text),
        token_ids=tuple(h.token_id for h in out.tokens),
        logprobs=tuple(h.logprob for h in out.tokens if h.logprob is not None),
        finish_reason=reason,
        stop_reason=stop,
        silent_stop=silent_stop,
    )


def load_frontend(
    model_path: Path,
    *,
    session_len: int,
    vocab_size: int,
    chat_template: ChatTemplateConfig | str | Path | None = None,
    interface_defaults: Mapping[str, float] | None = None,
    generation_config: str = "auto",
) -> Frontend:
    """The front end of the model at `model_path`. Raises ModelError and ConfigError.

    `interface_defaults` stand where neither the caller nor the model says anything. `generation_config` says
    where the model's defaults come from: "auto" (its own files), "lmdeploy" (none), or a directory.
    """
    tokenizer = load_tokenizer(model_path)
    tokenizer.check_vocabulary(vocab_size)
    if isinstance(chat_template, ChatTemplateConfig):
        override = {k: v for k, v in asdict(chat_template).items() if v is not None}
        template = load_chat_template(model_path, tokenizer, override)
    else:
        template = load_chat_template(model_path, tokenizer, chat_template)
    defaults = {**(interface_defaults or {}), **model_defaults(model_path, generation_config)}
    return Frontend(
        tokenizer, template, session_len=session_len, vocab_size=vocab_size, sampling_defaults=defaults
    )
