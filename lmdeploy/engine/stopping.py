"""When a sequence ends, as far as token ids and counts say; and the bans that keep it from ending too soon.

Stop strings are text and are found elsewhere.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lmdeploy.engine.request import FinishReason, Request, Sequence

Bias = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]


def finish_reason(seq: Sequence, capacity: int) -> FinishReason | None:
    """Why the sequence ends with its newest token, if it does. `capacity`: tokens that all blocks hold."""
    request = seq.request
    if seq.last_token in request.stop_ids and seq.num_output > request.min_new_tokens:
        return "stop"
    if seq.guide is not None and seq.guide.ended:
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


def update_bias(seq: Sequence) -> None:
    """Set `seq.bias` for the next draw; it changes only when min_new_tokens is reached."""
    if seq.num_output in (0, seq.request.min_new_tokens):
        seq.bias = _bias(seq.request, banned=seq.num_output < seq.request.min_new_tokens)


def _bias(request: Request, banned: bool) -> Bias | None:
    values = dict(request.sampling.logit_bias)
    if banned:
        values.update(dict.fromkeys(sorted(request.stop_ids), -np.inf))
    if not values:
        return None
    return np.array(list(values), np.int32), np.array(list(values.values()), np.float32)
