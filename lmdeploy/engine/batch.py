"""The one message from the engine to an executor, and the answer.

A `Batch` is ragged: prefill chunks and decode rows are the same thing, a row of one or more new tokens of one
sequence. It carries everything an executor needs; executors keep weights and cache blocks, never batches.
T = new tokens in all rows, R = rows, S = positions at which logits are wanted ("samples").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SampleColumns:
    """One entry per sample (S); ragged parts are offset arrays of length S + 1."""

    token_index: I32  # [S] index into Batch.token_ids of the token whose logits are wanted, ascending
    target_ids: I32  # [S] -1: draw a token; else score this id instead of drawing
    temperature: F32  # [S] 0: greedy
    top_k: I32  # [S] 0: off
    top_p: F32  # [S]
    min_p: F32  # [S]
    repetition_penalty: F32  # [S]
    presence_penalty: F32  # [S]
    frequency_penalty: F32  # [S]
    seed: U64  # [S]
    position: I64  # [S] number of tokens generated before this one: the random counter
    logprobs: I32  # [S] -1: none; k: chosen token and the k most likely
    bias_start: I32  # [S+1] into bias_ids / bias_values
    bias_ids: I32
    bias_values: F32  # -inf bans
    history_start: I32  # [S+1] into history_ids / history_counts; empty range when no penalty is on
    history_ids: I32  # distinct ids of prompt and output
    history_counts: I32  # how often the id occurs in the output (0: prompt only)
    want_logits: npt.NDArray[np.bool_]  # [S] return the raw logits row


@dataclass(frozen=True, slots=True)
class Batch:
    """New tokens of R rows with their cache blocks."""

    token_ids: I32  # [T]
    row_start: I32  # [R+1] offsets into token_ids
    context_len: I32  # [R] tokens of the sequence already in the cache (= position of the row's first token)
    block_start: I32  # [R+1] offsets into block_ids
    block_ids: I32  # cache blocks of each row in order, covering context_len + new tokens
    samples: SampleColumns

    @property
    def num_tokens(self) -> int:
        return int(self.row_start[-1])

    @property
    def num_rows(self) -> int:
        return len(self.context_len)


@dataclass(frozen=True, slots=True)
class StepResult:
    """One entry per sample. Log-probabilities are of the raw logits."""

    token_ids: I32  # [S] drawn id, or the target id
    finite: npt.NDArray[np.bool_]  # [S] False: the logits held NaN or infinity, token_ids is meaningless
    logprob: F32  # [S] of token_ids; 0 where not asked
    top_ids: I32  # [S, K] K = largest k asked in the batch, rows padded with -1
    top_logprobs: F32  # [S, K]
    logits: dict[int, F32]  # sample index -> raw logits [vocab], for samples with want_logits
