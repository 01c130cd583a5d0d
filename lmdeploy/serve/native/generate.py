"""POST /generate and /get_ppl: LMDeploy's own routes, a prompt without a template.

Owns the fields of their answers and events. Prompt and text come from `runtime.generate`, the run from
`generation`, framing from `sse`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lmdeploy.config import GenerationConfig
from lmdeploy.engine.request import TokenLogprobs
from lmdeploy.errors import InvalidValueError
from lmdeploy.runtime.generate import Choice
from lmdeploy.serve.generation import Answer, Generation, Piece, request_id
from lmdeploy.serve.native.protocol import GENERATED, GenerateBody, PerplexityBody
from lmdeploy.serve.openai.answers import make_answer
from lmdeploy.serve.openai.logprobs import floored
from lmdeploy.serve.openai.prompts import check_cut, plain_prompt, shorten_prompt
from lmdeploy.serve.openai.protocol import parse_body
from lmdeploy.serve.served import Served, Server
from lmdeploy.serve.sse import KEEP_ALIVE, encode, ending_well
from lmdeploy.serve.transport import EventStream, from_body, json_response, while_connected


@dataclass(frozen=True, slots=True)
class _Run:
    """One validated request, ready to run."""

    body: GenerateBody
    answer: Answer
    generation: Generation


async def generate(server: Server, request: Request) -> Response:
    run = await from_body(request, server, _prepare)
    if not run.body.stream:
        return await while_connected(request.receive, _whole(run))
    moments = run.generation.pieces(idle=server.options.keep_alive)
    first = await while_connected(request.receive, anext(moments))
    return EventStream(ending_well(_events(run, first, moments)))


async def get_ppl(server: Server, request: Request) -> Response:
    generation = await from_body(request, server, _scoring)
    (whole,) = await while_connected(request.receive, generation.whole())
    values = [floored(entry.logprob) for entry in whole.answer.prompt_logprobs]
    return json_response({"ppl": -sum(values) / len(values)})


def _prepare(server: Server, raw: bytearray) -> _Run:
    body = parse_body(GenerateBody, raw)
    served, _ = server.model(body.model)
    check_cut(served, body)
    config = body.generation_config(body.max_tokens or GENERATED, 0 if body.return_logprob else None)
    param = "input_ids" if body.prompt is None else "prompt"
    ids = shorten_prompt(_ids(served, body, param), body.truncate_prompt_tokens)
    answer = make_answer(served, body, config, ids, param=param)
    served.log_prompt(answer.request.request_id, ids)
    body.prompt = body.input_ids = None  # a long text is not kept while its answer is made
    generation = Generation(
        served.client, [answer], 1, server.running, body.names(), server.options.request_timeout
    )
    return _Run(body, answer, generation)


def _ids(served: Served, body: GenerateBody, param: str) -> list[int]:
    if body.input_ids is not None:
        return body.input_ids
    assert body.prompt is not None
    return plain_prompt(served, body.prompt, param, cut=body.truncate_prompt_tokens is not None)


async def _whole(run: _Run) -> Response:
    (whole,) = await run.generation.whole()
    return json_response(_body(run, whole.text, whole.token_ids, whole.entries, whole.end.finish_reason))


async def _events(
    run: _Run, first: list[Piece], moments: AsyncGenerator[list[Piece], None]
) -> AsyncGenerator[bytes, None]:
    async with aclosing(moments):
        yield _event(run, first)
        async for moment in moments:
            yield _event(run, moment)


def _event(run: _Run, moment: list[Piece]) -> bytes:
    deltas = [piece.delta for piece in moment]
    bodies = (_body(run, d.text, d.token_ids, d.logprobs, d.finish_reason) for d in deltas)
    return b"".join(b"data: " + encode(body) + b"\n\n" for body in bodies) if moment else KEEP_ALIVE


def _body(
    run: _Run, text: str, ids: Sequence[int], entries: Sequence[TokenLogprobs], reason: str | None
) -> dict[str, Any]:
    usage = run.generation.usage()
    info = {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "finish_reason": None if reason is None else {"type": reason},
        "output_token_logprobs": [(floored(e.logprob), e.token_id) for e in entries] or None,
    }
    return {"text": text, "output_ids": ids, "meta_info": info}


def _scoring(server: Server, raw: bytearray) -> Generation:
    body = parse_body(PerplexityBody, raw)
    served, _ = server.model(body.model)
    ids = plain_prompt(served, body.input, "input") if isinstance(body.input, str) else body.input
    if len(ids) < 2:
        raise InvalidValueError("'input' must have at least 2 tokens: the first has no value.", param="input")
    request = served.frontend.scoring(request_id(), ids, param="input")
    answer = Answer(0, request, Choice(served.frontend, GenerationConfig()))
    return Generation(served.client, [answer], per_prompt=1)
