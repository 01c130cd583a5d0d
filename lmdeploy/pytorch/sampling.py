"""Draws and scores on one row of logits, in NumPy: the rules of `engine.request.SamplingParams`.

The same rules, random numbers and ties as the native engine's csrc/sampling.cpp, so that equal logits give
equal tokens. Probabilities are float64. Knows no torch, no batch beyond its sample columns.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lmdeploy.engine.batch import F32, Batch, SampleColumns, StepResult

LOWEST_LOGPROB = np.float32(-9999.0)
_GREEDY_BELOW = np.float32(1e-5)  # temperatures under this only ever choose the largest

F64 = npt.NDArray[np.float64]
Ids = npt.NDArray[np.intp]


def empty_result(columns: SampleColumns) -> StepResult:
    """A result to be filled by `sample_row`."""
    count, top = len(columns.token_index), max(int(columns.logprobs.max(initial=0)), 0)
    return StepResult(
        token_ids=np.full(count, -1, np.int32),
        finite=np.zeros(count, np.bool_),
        logprob=np.zeros(count, np.float32),
        top_ids=np.full((count, top), -1, np.int32),
        top_logprobs=np.full((count, top), LOWEST_LOGPROB, np.float32),
        logits={},
    )


def sample_row(logits: F32, batch: Batch, i: int, result: StepResult) -> None:
    """Draw or score sample `i` from its raw logits float32 [vocab], and write its entries of `result`.

    The batch's masks must be there.
    """
    columns = batch.samples
    if columns.want_logits[i]:
        result.logits[i] = logits.copy()
    if not np.isfinite(logits).all():
        return
    token = int(columns.target_ids[i])
    if token < 0:
        allowed = None if batch.masks is None else batch.masks.allowed(i, len(logits))
        token = _choose(logits, columns, i, allowed)
    if token < 0:
        return
    result.token_ids[i], result.finite[i] = token, True
    if columns.logprobs[i] >= 0:
        _write_logprobs(logits, columns, i, result)


def _choose(logits: F32, c: SampleColumns, i: int, allowed: npt.NDArray[np.bool_] | None) -> int:
    """The drawn id, or -1 when every id is banned."""
    x = _changed(logits, c, i)
    if allowed is not None:
        x = np.where(allowed, x, np.float32(-np.inf))
    largest = int(x.argmax())
    if not np.isfinite(x[largest]):
        return -1
    if c.temperature[i] < _GREEDY_BELOW:
        return largest
    weights = np.exp((x.astype(np.float64) - float(x[largest])) * float(np.float32(1) / c.temperature[i]))
    kept = _kept(x, weights, c, i)
    return _draw(weights, kept, uniform(int(c.seed[i]), int(c.position[i])))


def _changed(logits: F32, c: SampleColumns, i: int) -> F32:
    """Bias, then repetition, presence and frequency penalties, in float32."""
    bias = slice(c.bias_start[i], c.bias_start[i + 1])
    history = slice(c.history_start[i], c.history_start[i + 1])
    if bias.start == bias.stop and history.start == history.stop:
        return logits
    x = logits.copy()
    np.add.at(x, c.bias_ids[bias], c.bias_values[bias])
    ids, counts, repetition = c.history_ids[history], c.history_counts[history], c.repetition_penalty[i]
    values = x[ids]
    if repetition != 1:
        values = np.where(values > 0, values / repetition, values * repetition)
    penalty = c.presence_penalty[i] + c.frequency_penalty[i] * counts.astype(np.float32)
    x[ids] = np.where(counts > 0, values - penalty, values)
    return np.asarray(x)


def _kept(x: F32, weights: F64, c: SampleColumns, i: int) -> Ids | None:
    """Ids that pass top_k, top_p and min_p, in that order; None: all."""
    kept = None
    if 0 < c.top_k[i] < len(x):
        kept = largest_ids(x, int(c.top_k[i]))
    if c.top_p[i] < 1:
        kept = largest_ids(x, len(x)) if kept is None else kept
        mass = np.cumsum(weights[kept])
        kept = kept[: int(np.searchsorted(mass, float(c.top_p[i]) * mass[-1])) + 1]
    if c.min_p[i] > 0:
        kept = np.arange(len(x)) if kept is None else kept
        kept = kept[weights[kept] >= c.min_p[i].astype(np.float64)]
    return kept


def largest_ids(x: F32, count: int) -> Ids:
    """Ids of the `count` largest finite values, largest first, equal values by id."""
    if count == 0:
        return np.zeros(0, np.intp)
    finite = np.flatnonzero(x > -np.inf)
    if count < len(finite):
        least = np.partition(x[finite], len(finite) - count)[len(finite) - count]
        finite = finite[x[finite] >= least]
    return finite[np.argsort(-x[finite], kind="stable")][:count]


def _draw(weights: F64, kept: Ids | None, u: float) -> int:
    """The first id, in ascending order, at which the mass passed exceeds u times the whole."""
    ids = np.arange(len(weights)) if kept is None else np.sort(kept)
    mass = np.cumsum(weights[ids])
    place = int(np.searchsorted(mass, u * mass[-1], side="right"))
    return int(ids[min(place, int(np.searchsorted(mass, mass[-1])))])


def _write_logprobs(logits: F32, c: SampleColumns, i: int, result: StepResult) -> None:
    largest = float(logits.max())
    total = largest + np.log(np.exp(logits.astype(np.float64) - largest).sum())

    def logprobs(ids: int | Ids) -> F32:
        return np.asarray(np.maximum(logits[ids] - total, LOWEST_LOGPROB), np.float32)

    result.logprob[i] = logprobs(int(result.token_ids[i]))
    ids = largest_ids(logits, int(c.logprobs[i]))
    result.top_ids[i, : len(ids)], result.top_logprobs[i, : len(ids)] = ids, logprobs(ids)


def uniform(seed: int, position: int) -> float:
    """53 random bits as a number in [0, 1): a function of the two unsigned 64-bit numbers only."""
    low = 0xFFFFFFFF
    words = philox4x32((position & low, position >> 32 & low, 0, 0), (seed & low, seed >> 32))
    return float((words[0] << 32 | words[1]) >> 11) * 2.0**-53


def philox4x32(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10, the counter-based generator of Salmon et al. (2011)."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = p1 >> 32 ^ b ^ k0, p1 & 0xFFFFFFFF, p0 >> 32 ^ d ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = k0 + 0x9E3779B9 & 0xFFFFFFFF, k1 + 0xBB67AE85 & 0xFFFFFFFF
    return a, b, c, d
