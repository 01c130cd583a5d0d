"""From a body and prompt ids to one answer that is ready to run, the same on every route that generates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmdeploy.config import GenerationConfig
from lmdeploy.engine.request import Grammar, TokenLogprobs
from lmdeploy.runtime.generate import Choice
from lmdeploy.serve.generation import Answer, request_id
from lmdeploy.serve.openai.logprobs import floored
from lmdeploy.serve.openai.protocol import GenerationBody
from lmdeploy.serve.record import RECORD
from lmdeploy.serve.served import Served
from lmdeploy.text.tokenizer import Tokenizer


def make_answer(
    served: Served,
    body: GenerationBody,
    config: GenerationConfig,
    ids: Sequence[int],
    *,
    param: str,
    index: int = 0,
    choice: int = 0,
    prompt_logprobs: int | None = None,
    grammar: Grammar | None = None,
    printed: frozenset[int] = frozenset(),
) -> Answer:
    """`param` names the field that held the prompt, `choice` numbers the answers to it. `grammar` stands
    before the one the body asks for; `printed` are control tokens whose text is wanted.

    Raises RequestError.
    """
    request = served.frontend.request(
        request_id(),
        ids,
        config,
        param=param,
        choice=choice,
        cache_salt=body.cache_salt or "",
        prompt_logprobs=max(
            (n for n in (body.prompt_logprobs, prompt_logprobs) if n is not None), default=None
        ),
        streams=bool(body.stream),
        priority=body.priority or 0,
        account=record.key if (record := RECORD.get()) is not None else "",
        grammar=grammar or body.grammar,
    )
    return Answer(index, request, Choice(served.frontend, config, printed))


def prompt_logprobs(
    tokenizer: Tokenizer, body: GenerationBody, answer: Answer
) -> dict[str, list[dict[str, Any] | None]]:
    """The field of that name, where it was asked for: nothing for the first token, which nothing precedes.

    `rank` is null where the token is not among the likeliest that were asked for.
    """
    if body.prompt_logprobs is None:
        return {}
    top = body.prompt_logprobs
    return {"prompt_logprobs": [None, *(_position(tokenizer, e, top) for e in answer.prompt_logprobs)]}


def _position(tokenizer: Tokenizer, entry: TokenLogprobs, top: int) -> dict[str, Any]:
    ranked = [i for i in entry.top_ids[:top] if i >= 0]
    values = {entry.token_id: entry.logprob, **dict(zip(ranked, entry.top_logprobs, strict=False))}
    return {
        str(i): {
            "logprob": floored(value),
            "rank": ranked.index(i) + 1 if i in ranked else None,
            "decoded_token": tokenizer.token_text(i),
        }
        for i, value in values.items()
    }
