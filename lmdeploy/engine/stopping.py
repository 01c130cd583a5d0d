"""When a sequence ends, as far as token ids and counts say; and the bans that keep it from ending too soon.

Stop strings are text and are found elsewhere.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lmdeploy.engine.request import FinishReason, Request, Sequence

REPETITION_WINDOW = 1024  # tokens

Bias = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]


def finish_reason(seq: Sequence, capacity: int) -> FinishReason | None:
    """Why the sequence ends with its newest token, if it does. `capacity`: tokens that all blocks hold."""
    request = seq.request
    if seq.last_token in request.stop_ids and seq.num_output > request.min_new_tokens:
        return "stop"
    if seq.guide is not None and seq.guide.ended:
        return "stop"
    if request.repetition is not None and seq.num_output > request.min_new_tokens and _repeats(seq):
        return "stop"
    if seq.num_output >= request.max_new_tokens or seq.length >= capacity:
        return "length"
    return None


def stop_id(seq: Sequence) -> int | None:
    """The newest token of a sequence that stopped, if it is one that ends answers and no part of the text."""
    ends = seq.last_token in seq.request.stop_ids or (
        seq.guide is not None and seq.last_token in seq.guide.end_ids
    )
    return seq.last_token if ends else None


def _repeats(seq: Sequence) -> bool:
    """Whether the last n tokens have come often enough, at any places of the last REPETITION_WINDOW ones."""
    assert seq.request.repetition is not None
    n, times = seq.request.repetition
    window = seq.tokens[max(seq.num_prompt, seq.length - REPETITION_WINDOW) : seq.length]
    if len(window) < n + times - 1:
        return False
    runs = np.lib.stride_tricks.sliding_window_view(window, n)
    return int((runs == window[-n:]).all(axis=1).sum()) >= times


def update_bias(seq: Sequence, vocab_size: int) -> None:
    """Set `seq.bias` for the next draw; it changes only when min_new_tokens is reached."""
    if seq.num_output in (0, seq.request.min_new_tokens):
        seq.bias = _bias(seq.request, seq.num_output < seq.request.min_new_tokens, vocab_size)


def _bias(request: Request, banned: bool, vocab_size: int) -> Bias | None:
    if request.sampling.allowed_ids is not None:
        return _only_allowed(request, banned, vocab_size)
    values = dict(request.sampling.logit_bias)
    if banned:
        values.update(dict.fromkeys(sorted(request.stop_ids), -np.inf))
    if not values:
        return None
    return np.array(list(values), np.int32), np.array(list(values.values()), np.float32)


def _only_allowed(request: Request, banned: bool, vocab_size: int) -> Bias:
    """A value for every id: what bans the others."""
    values = np.full(vocab_size, -np.inf, np.float32)
    values[list(request.sampling.allowed_ids or ())] = 0
    for token, value in request.sampling.logit_bias:
        values[token] += value
    if banned:
        values[sorted(request.stop_ids)] = -np.inf
    return np.arange(vocab_size, dtype=np.int32), values
