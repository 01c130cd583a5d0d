"""Which requests the engine can serve: all that would make an executor refuse a batch is refused here, alone.

An executor sees whole batches, so one bad row would cost its neighbours their step. Knows requests and
capabilities; no text and no names of fields on the wire.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from lmdeploy.engine.executor import Capabilities
from lmdeploy.engine.request import Request, SamplingParams
from lmdeploy.errors import ContextLengthError, RequestError

_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def check_request(request: Request, caps: Capabilities) -> None:
    """Raise RequestError, in one line, for a request that can never be served."""
    _check_prompt(request, caps)
    _check_ids(request, caps.vocab_size)
    _check_numbers(request.sampling)
    if max(request.sampling.logprobs or 0, request.prompt_logprobs or 0) > caps.max_logprobs:
        raise RequestError(
            f"more than {caps.max_logprobs} log-probabilities for a position cannot be returned"
        )


def _check_prompt(request: Request, caps: Capabilities) -> None:
    count, capacity = len(request.prompt_ids), caps.num_blocks * caps.block_size
    if count == 0:
        raise RequestError("the prompt holds no token; send at least one")
    if count + 1 > capacity:
        raise ContextLengthError(
            f"the prompt of {count} tokens does not fit the cache of {capacity} tokens together with one new"
            " token; shorten it or give the cache more memory"
        )


def _check_ids(request: Request, vocab_size: int) -> None:
    ids = np.asarray(request.prompt_ids)
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise RequestError(f"the prompt holds a token id outside the vocabulary of {vocab_size}")
    banned = request.stop_ids if request.min_new_tokens else ()
    if any(not 0 <= token < vocab_size for token in _named_ids(request.sampling, banned)):
        raise RequestError(
            f"logit_bias, allowed_token_ids or a banned stop id is outside the vocabulary of {vocab_size}"
        )


def _named_ids(s: SamplingParams, banned: Iterable[int]) -> Iterable[int]:
    return (*dict(s.logit_bias), *(s.allowed_ids or ()), *banned)


def _check_numbers(s: SamplingParams) -> None:
    if not 0 <= s.seed < 1 << 64 or not 0 <= s.top_k < 1 << 31:
        raise RequestError(
            "seed must be an unsigned 64-bit number, top_k one that is not negative and below 2**31"
        )
    # Each comparison is false for NaN. Batches hold float32: beyond it a number would become 0 or infinite.
    good = {
        "temperature": 0 <= s.temperature <= _MOST,
        "top_p": _LEAST <= s.top_p <= 1,
        "min_p": 0 <= s.min_p <= 1,
        "repetition_penalty": _LEAST <= s.repetition_penalty <= _MOST,
        "presence_penalty": abs(s.presence_penalty) <= _MOST,
        "frequency_penalty": abs(s.frequency_penalty) <= _MOST,
        "logit_bias": all(abs(x) <= _MOST or x == -np.inf for _, x in s.logit_bias),
    }
    for name, fits in good.items():
        if not fits:
            raise RequestError(f"{name} is out of range", param=name)
