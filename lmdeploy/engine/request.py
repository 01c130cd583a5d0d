"""What a user asked (`Request`, immutable) and what the engine knows about it (`Sequence`, mutable).

Knows token ids and numbers only: no text, no tokenizer, no wire format, no model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn from the logits of one sequence.

    Order of application: `logit_bias` and bans, then repetition, presence and frequency penalties, then
    temperature, then top_k, top_p, min_p (each on the distribution the previous one left; min_p is relative to
    the largest probability after temperature). `temperature` 0 is greedy whatever the other fields say.
    """

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # once per distinct id of prompt and output
    presence_penalty: float = 0.0  # output only
    frequency_penalty: float = 0.0  # output only
    seed: int = 0  # unsigned 64 bit; the draw depends on (seed, number of tokens generated so far) only
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias); -inf bans
    logprobs: int | None = None  # None: none; k >= 0: of the chosen token and the k most likely ones


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue. Lengths are in tokens."""

    request_id: str
    prompt_ids: npt.NDArray[np.int32]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()  # end generation; the id is reported, its text is not printed
    min_new_tokens: int = 0  # stop_ids are banned until this many tokens exist
    cache_salt: str = ""  # requests of different salts never share cached blocks
    prompt_logprobs: int | None = None  # score the prompt: log-probability of each prompt token, top-k beside it
    want_logits: bool = False  # return the raw logits of each generated token (float32 [vocab])


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-softmax of the raw logits for one position."""

    token_id: int
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """What one engine step produced for one request."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # with the first generated token; for prompt positions 1..n-1
    logits: npt.NDArray[np.float32] | None = None  # [len(token_ids), vocab] when the request wants logits
    finish_reason: FinishReason | None = None
    stop_id: int | None = None  # the stop id that ended it, when finish_reason is "stop"
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    error: str | None = None  # one line, when finish_reason is "error"
