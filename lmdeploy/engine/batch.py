"""The one message from the engine to an executor, and the answer.

A `Batch` is ragged: prefill chunks and decode rows are the same thing, a row of one or more new tokens of
one sequence. A row may end in drafts, tokens that are only supposed to come next: then a token is drawn at
the last real one and at each draft, with the position, bias and history it has if the drafts before it are
right. A batch carries everything an executor needs; executors keep weights and cache blocks, never batches.
`Packer` builds it from planned rows. T = new tokens in all rows, R = rows, S = positions at which logits are
wanted ("samples").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from lmdeploy.engine.request import Request, SamplingParams, Sequence

# A sequence and how many of its tokens to compute, drafts behind the last included.
Row = tuple[Sequence, int]

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
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
class Masks:
    """Tokens that samples may be. Written while the batch is computed: `wait` before reading `bits`.

    Applied after bans, bias and penalties, before temperature; log-probabilities know nothing of them.
    """

    index: I32  # [S] row of `bits`; -1: any token
    bits: U32  # [rows, ceil(vocabulary / 32)]; bit t % 32 of word t // 32: token t may be drawn
    wait: Callable[[], None]  # returns when all bits are there; never raises

    def allowed(self, sample: int, vocab_size: int) -> npt.NDArray[np.bool_] | None:
        """[vocabulary] which tokens the sample may be; None: any."""
        row = int(self.index[sample])
        if row < 0:
            return None
        flags = np.unpackbits(self.bits[row].view(np.uint8), bitorder="little", count=vocab_size)
        return flags.view(np.bool_)


@dataclass(frozen=True, slots=True)
class Batch:
    """New tokens of R rows with their cache blocks."""

    token_ids: I32  # [T]
    row_start: I32  # [R+1] offsets into token_ids
    context_len: I32  # [R] tokens of the sequence already in the cache (= position of the row's first token)
    block_start: I32  # [R+1] offsets into block_ids
    block_ids: I32  # cache blocks of each row in order, covering context_len + new tokens
    samples: SampleColumns
    masks: Masks | None = None

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


# The columns that stay the same for all samples of one request, as one packed record for each sample.
_RECORD = np.dtype(
    [
        ("temperature", "<f4"),
        ("top_p", "<f4"),
        ("min_p", "<f4"),
        ("repetition_penalty", "<f4"),
        ("presence_penalty", "<f4"),
        ("frequency_penalty", "<f4"),
        ("top_k", "<i4"),
        ("logprobs", "<i4"),
        ("seed", "<u8"),
        ("want_logits", "?"),
    ]
)
_NONE_I32 = np.zeros(0, np.int32)
_NONE_F32 = np.zeros(0, np.float32)


def _records(request: Request) -> tuple[bytes, bytes]:
    """(record of a drawn token, record of a scored prompt token)."""
    scored = SamplingParams(logprobs=request.prompt_logprobs)
    return _record(request.sampling, request.want_logits), _record(scored, False)


def _record(s: SamplingParams, want_logits: bool) -> bytes:
    floats = (s.temperature, s.top_p, s.min_p)
    penalties = (s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
    logprobs = -1 if s.logprobs is None else s.logprobs
    return np.array([(*floats, *penalties, s.top_k, logprobs, s.seed, want_logits)], _RECORD).tobytes()


class Packer:
    """Turns planned rows into a `Batch`.

    Cost depends on rows and new tokens, hardly on context: state lives in arrays of the sequences, and the
    constant columns are kept from one step to the next while the same requests sample. Arrays handed out are
    never written again.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._last_records: list[bytes] | None = None
        self._columns: dict[str, Any] = {}

    def pack(self, rows: list[Row], masks: Masks | None = None) -> Batch:
        """Rows must hold blocks for all their new tokens. `masks`: of these rows."""
        size = self._block_size
        computed = [seq.num_computed for seq, _ in rows]
        counts = [n for _, n in rows]
        blocks = [-(-(c + n) // size) for c, n in zip(computed, counts, strict=True)]
        starts = [0, *accumulate(counts)]
        return Batch(
            token_ids=_token_ids(rows, starts[-1]),
            row_start=np.array(starts, np.int32),
            context_len=np.array(computed, np.int32),
            block_start=np.array([0, *accumulate(blocks)], np.int32),
            block_ids=np.concatenate([r[0].block_ids[:b] for r, b in zip(rows, blocks, strict=True)]),
            samples=self._samples(rows, starts),
            masks=masks,
        )

    def _samples(self, rows: list[Row], starts: list[int]) -> SampleColumns:
        index: list[int] = []
        targets: list[int] = []
        positions: list[int] = []
        biases: list[Any] = []
        histories: list[Any] = []
        records: list[bytes] = []
        for (seq, n), start in zip(rows, starts, strict=False):
            if seq.packed is None:
                seq.packed = _records(seq.request)
            if seq.scores_prompt and (scored := seq.scored_positions(n)):
                index += [start + p - seq.num_computed for p in scored]
                targets += seq.tokens[scored.start + 1 : scored.stop + 1].tolist()
                positions += [0] * len(scored)
                biases += [None] * len(scored)
                histories += [None] * len(scored)
                records += [seq.packed[1]] * len(scored)
            draws = seq.num_computed + n - seq.length + 1
            if draws == 1:  # nearly every row, so without lists of one
                index.append(start + n - 1)
                targets.append(-1)
                positions.append(seq.length - seq.num_prompt)
                biases.append(seq.bias)
                histories.append(None if seq.history is None else seq.history.view())
                records.append(seq.packed[0])
            elif draws > 1:
                index += range(start + n - draws, start + n)
                targets += [-1] * draws
                positions += range(seq.num_output, seq.num_output + draws)
                biases += [seq.bias] * draws
                histories += _histories(seq, draws)
                records += [seq.packed[0]] * draws
        bias_start, bias_ids, bias_values = _ragged(biases, _NONE_F32)
        history_start, history_ids, history_counts = _ragged(histories, _NONE_I32)
        return SampleColumns(
            token_index=np.array(index, np.int32),
            target_ids=np.array(targets, np.int32),
            position=np.array(positions, np.int64),
            **self._constant_columns(records),
            bias_start=bias_start,
            bias_ids=bias_ids,
            bias_values=bias_values,
            history_start=history_start,
            history_ids=history_ids,
            history_counts=history_counts,
        )

    def _constant_columns(self, records: list[bytes]) -> dict[str, Any]:
        if records != self._last_records:
            table = np.frombuffer(b"".join(records), _RECORD)
            self._columns = {name: np.ascontiguousarray(table[name]) for name in _RECORD.fields or ()}
            self._last_records = records
        return self._columns


def _token_ids(rows: list[Row], total: int) -> I32:
    if total == len(rows):
        return np.array([seq.tokens[seq.num_computed] for seq, _ in rows], np.int32)
    return np.concatenate([seq.tokens[seq.num_computed : seq.num_computed + n] for seq, n in rows])


def _histories(seq: Sequence, draws: int) -> list[Any]:
    if seq.history is None:
        return [None] * draws
    return seq.history.views(seq.tokens[seq.length : seq.length + draws - 1].tolist())


def _ragged(parts: list[Any], no_values: npt.NDArray[Any]) -> tuple[I32, I32, npt.NDArray[Any]]:
    """Offsets, ids and values of (ids, values) pairs; None is an empty part."""
    some = [p for p in parts if p is not None]
    if not some:
        return np.zeros(len(parts) + 1, np.int32), _NONE_I32, no_values
    sizes = [0 if p is None else len(p[0]) for p in parts]
    start = np.array([0, *accumulate(sizes)], np.int32)
    return start, np.concatenate([p[0] for p in some]), np.concatenate([p[1] for p in some])
