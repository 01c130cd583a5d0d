"""POST /v1/completions.

Owns the fields of its answers and chunks, echo, and the choice of the best of several answers. Prompt and
text come from `runtime.generate`, the run from `generation`, framing from `sse`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lmdeploy.config import GenerationConfig
from lmdeploy.engine.request import TokenLogprobs
from lmdeploy.runtime.generate import Choice, Delta
from lmdeploy.serve.generation import Answer, Generation, Piece, Whole, request_id
from lmdeploy.serve.openai.answers import make_answer, prompt_logprobs
from lmdeploy.serve.openai.logprobs import CompletionLogprobs, floored
from lmdeploy.serve.openai.prompts import Prompt, check_cut, completion_prompts
from lmdeploy.serve.openai.protocol import CompletionBody, parse_body
from lmdeploy.serve.openai.streaming import ChunkStream
from lmdeploy.serve.served import Reply, Served, Server
from lmdeploy.serve.transport import from_body, json_response, while_connected
from lmdeploy.text.detokenize import Detokenizer

DEFAULT_MAX_TOKENS = 16  # OpenAI's; short on purpose there, and what clients of this route expect


@dataclass(frozen=True, slots=True)
class Completion:
    """One validated request, ready to run. `prompts` are the given texts where they are echoed."""

    served: Served
    body: CompletionBody
    reply: Reply
    generation: Generation
    prompts: Sequence[str | None]

    def prompt_of(self, answer: Answer) -> str | None:
        return self.prompts[answer.index // self.generation.per_prompt]


async def completions(server: Server, request: Request) -> Response:
    completion = await from_body(request, server, _prepare)
    if completion.body.stream:
        chunks = _Chunks(completion)
        options = completion.body.stream_options
        generation, head = completion.generation, completion.reply.head("text_completion")
        stream = ChunkStream(generation.pieces, generation.usage, head, options, chunks.choices_of)
        return await stream.response(request, server.options.keep_alive)
    return await while_connected(request.receive, _whole(completion))


def _prepare(server: Server, raw: bytearray) -> Completion:
    """Everything that can fail before generation; one bad prompt fails the request."""
    body: CompletionBody = parse_body(CompletionBody, raw)
    served, model = server.model(body.model)
    check_cut(served, body)
    prompts = completion_prompts(served, body)
    config = body.generation_config(*_limits(body))
    per_prompt = body.best_of or body.choices
    answers = [
        _answer(served, body, config, prompt, number * per_prompt + choice, choice)
        for number, prompt in enumerate(prompts)
        for choice in range(per_prompt)
    ]
    generation = Generation(
        served.client, answers, per_prompt, server.running, body.names(), server.options.request_timeout
    )
    texts = [prompt.text if body.echo else None for prompt in prompts]
    body.prompt = None  # a long text is not kept while its answer is made
    reply = served.reply("cmpl", model, body.request_id)
    for prompt in prompts:
        served.log_prompt(reply.id, prompt.ids)
    return Completion(served, body, reply, generation, texts)


def _limits(body: CompletionBody) -> tuple[int, int | None]:
    """(max_new_tokens, logprobs) for the engine; ranking needs log-probabilities."""
    limit = body.max_tokens or DEFAULT_MAX_TOKENS
    ranks = body.best_of is not None and body.best_of > body.choices
    return limit, 0 if body.logprobs is None and ranks else body.logprobs


def _answer(
    served: Served, body: CompletionBody, config: GenerationConfig, prompt: Prompt, index: int, choice: int
) -> Answer:
    if body.max_tokens == 0:
        top = max(body.logprobs or 0, body.prompt_logprobs or 0)
        scoring = served.frontend.scoring(request_id(), prompt.ids, param=prompt.path, top=top)
        return Answer(index, scoring, Choice(served.frontend, config))
    echoed = body.logprobs if body.echo else None
    return make_answer(
        served,
        body,
        config,
        prompt.ids,
        param=prompt.path,
        index=index,
        choice=choice,
        prompt_logprobs=echoed,
    )


async def _whole(completion: Completion) -> Response:
    chosen = _best(completion, await completion.generation.whole())
    return json_response(
        {
            **completion.reply.head("text_completion"),
            "choices": [_choice(completion, index, whole) for index, whole in enumerate(chosen)],
            "usage": completion.generation.usage().body(),
        }
    )


def _best(completion: Completion, wholes: list[Whole]) -> list[Whole]:
    """Of each prompt's answers the n of highest mean log-probability, best first."""
    per_prompt, n = completion.generation.per_prompt, completion.body.choices
    if per_prompt == n:
        return wholes
    groups = [wholes[i : i + per_prompt] for i in range(0, len(wholes), per_prompt)]
    return [whole for group in groups for whole in sorted(group, key=_mean, reverse=True)[:n]]


def _mean(whole: Whole) -> float:
    values = [floored(e.logprob) for e in whole.entries]
    return sum(values) / len(values) if values else 0.0


def _choice(completion: Completion, index: int, whole: Whole) -> dict[str, Any]:
    line = _Line(completion, whole.answer)
    parts = [line.echo()] if completion.body.echo else []
    parts.append(line.part(whole.text, whole.token_ids, whole.entries, whole.end))
    text = "".join(p.text for p in parts)
    choice = {"index": index, "text": text, "logprobs": _joined(parts), **_end(whole.end)}
    tokenizer = completion.served.frontend.tokenizer
    choice |= prompt_logprobs(tokenizer, completion.body, whole.answer)
    if completion.body.return_token_ids:
        choice["token_ids"] = whole.token_ids
        choice["prompt_token_ids"] = whole.answer.request.prompt_ids.tolist()
    return choice


def _end(delta: Delta) -> dict[str, Any]:
    return {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}


@dataclass(frozen=True, slots=True)
class _Part:
    text: str
    logprobs: dict[str, list[Any]] | None


def _joined(parts: list[_Part]) -> dict[str, list[Any]] | None:
    lists = [p.logprobs for p in parts if p.logprobs is not None]
    return {key: [x for one in lists for x in one[key]] for key in lists[0]} if lists else None


class _Line:
    """Text and log-probabilities of one answer, part by part."""

    def __init__(self, completion: Completion, answer: Answer) -> None:
        self._completion = completion
        self._answer = answer
        body, self._tokenizer = completion.body, completion.served.frontend.tokenizer
        self._wanted = body.logprobs is not None
        self._logprobs = CompletionLogprobs(self._tokenizer, body.logprobs or 0)
        self._detokenizer = Detokenizer(self._tokenizer, body.skip_special_tokens is not False)

    def echo(self) -> _Part:
        """The prompt."""
        given = self._completion.prompt_of(self._answer)
        ids = self._answer.request.prompt_ids.tolist()
        skip = given is None and self._completion.body.skip_special_tokens is not False
        texts = [piece.feed([i]) for piece in [Detokenizer(self._tokenizer, skip)] for i in ids]
        if given is not None and ids[0] == self._tokenizer.bos_id and not given.startswith(texts[0]):
            texts[0] = ""
        entries = self._answer.prompt_logprobs
        listed = self._logprobs.part(entries, texts, first=ids[0]) if self._wanted else None
        return _Part("".join(texts) if given is None else given, listed)

    def part(self, text: str, ids: Sequence[int], entries: Sequence[TokenLogprobs], delta: Delta) -> _Part:
        """Generated tokens; a token that ended the answer without printing is listed with no text."""
        if not self._wanted:
            return _Part(text, None)
        silent = len(ids) - 1 if delta.silent_stop is not None else len(ids)
        texts = ["" if n >= silent else self._detokenizer.feed([i]) for n, i in enumerate(ids)]
        return _Part(text, self._logprobs.part(entries, texts))


class _Chunks:
    """The entries of `choices` in one completions stream."""

    def __init__(self, completion: Completion) -> None:
        self._completion = completion
        self._lines: dict[int, _Line] = {}

    def choices_of(self, piece: Piece) -> list[dict[str, Any]]:
        answer, delta, body = piece.answer, piece.delta, self._completion.body
        out = []
        if answer.index not in self._lines:
            self._lines[answer.index] = _Line(self._completion, answer)
            if body.echo:
                out.append(_chunk(answer, self._lines[answer.index].echo(), **self._prompt_ids(answer)))
        part = self._lines[answer.index].part(delta.text, delta.token_ids, delta.logprobs, delta)
        ids = {"token_ids": delta.token_ids} if body.return_token_ids and delta.token_ids else {}
        if part.text or ids or (part.logprobs and part.logprobs["tokens"]):
            out.append(_chunk(answer, part, **ids))
        if delta.finish_reason is not None:
            out.append(_chunk(answer, _Part("", None), **_end(delta)))
        return out

    def _prompt_ids(self, answer: Answer) -> dict[str, Any]:
        wanted = self._completion.body.return_token_ids
        return {"prompt_token_ids": answer.request.prompt_ids.tolist()} if wanted else {}


def _chunk(answer: Answer, part: _Part, **more: Any) -> dict[str, Any]:
    fields = {"index": answer.index, "text": part.text, "logprobs": part.logprobs, "finish_reason": None}
    return {**fields, **more}
