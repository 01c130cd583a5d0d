"""An executor without a model, for tests of everything above the seam.

Each slot of a cache block holds a 64-bit value chained over the whole prefix, read back through the block
table; the next token depends on every value read. So any fault of scheduling, sharing or preemption changes
the text. A `Batch` that breaks the contract fails an assertion. Knows nothing of sequences or requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from lmdeploy.engine.batch import U64, Batch, Masks, SampleColumns, StepResult
from lmdeploy.engine.executor import Capabilities

_MASK = (1 << 64) - 1
_POISON = 0  # the value of a token whose prefix holds the poison id; stands for NaN


def _mix(value: int) -> int:
    """Finalizer of SplitMix64 (Steele, Lea, Flood 2014): a bijection on 64 bits."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@dataclass
class FakeExecutor:
    """Deterministic in (prefix, seed, position) and the sampling columns of the row itself.

    `script`: the tokens drawn at positions 0, 1, ... of every request; beyond it they are hashed.
    `poison_id`: a sequence with this token yields non-finite samples from there on.
    `rewrites`: tokens may be computed again in other words, as by a draft model whose drafts were wrong.
    `on_step` sees each batch first; it may sleep, record or raise.
    """

    block_size: int = 16
    num_blocks: int = 64
    max_step_tokens: int = 512
    max_rows: int = 32
    vocab_size: int = 1000
    max_logprobs: int = 20
    script: tuple[int, ...] = ()
    poison_id: int = -1
    rewrites: bool = False
    on_step: Callable[[Batch], None] | None = None

    def __post_init__(self) -> None:
        self._values: U64 = np.zeros((self.num_blocks, self.block_size), np.uint64)
        self._filled = [0] * self.num_blocks  # slots written since the block was begun
        self._firm = [0] * self.num_blocks  # those of them that no draft may have left
        self._weights = np.arange(1, 2 * self.num_blocks * self.block_size, 2, dtype=np.uint64)

    def capabilities(self) -> Capabilities:
        return Capabilities(
            self.block_size,
            self.num_blocks,
            self.max_step_tokens,
            self.max_rows,
            self.vocab_size,
            self.max_logprobs,
        )

    def execute(self, batch: Batch) -> StepResult:
        if self.on_step is not None:
            self.on_step(batch)
        self._check(batch)
        tables = [batch.block_ids[a:b] for a, b in _spans(batch.block_start)]
        drawing = batch.samples.token_index[batch.samples.target_ids < 0]
        for row, (a, b) in enumerate(_spans(batch.row_start)):
            own = drawing[(drawing >= a) & (drawing < b)]
            drafts = b - 1 - int(own[0]) if len(own) else 0
            self._write(tables[row], int(batch.context_len[row]), batch.token_ids[a:b].tolist(), drafts)
        if batch.masks is not None:
            batch.masks.wait()
            assert len(batch.masks.index) == len(batch.samples.token_index), "one mask index per sample"
        return self._sample(batch, tables)

    def close(self) -> None:
        self._values = np.zeros((0, self.block_size), np.uint64)

    def _check(self, batch: Batch) -> None:
        new = np.diff(batch.row_start)
        assert batch.num_rows <= self.max_rows, "too many rows"
        assert 0 < batch.num_tokens <= self.max_step_tokens, "no token or too many"
        assert len(batch.token_ids) == batch.num_tokens
        assert (new >= 1).all(), "a row without a token to compute"
        assert (batch.token_ids >= 0).all()
        assert (batch.token_ids < self.vocab_size).all(), "token id beyond the vocabulary"
        covering = -(-(batch.context_len + new) // self.block_size)
        assert (np.diff(batch.block_start) == covering).all(), "blocks do not cover the row exactly"
        assert (batch.block_ids >= 0).all()
        assert (batch.block_ids < self.num_blocks).all(), "block out of range"
        self._check_writes(batch)

    def _check_writes(self, batch: Batch) -> None:
        users = np.bincount(batch.block_ids, minlength=self.num_blocks)
        for row, (a, b) in enumerate(_spans(batch.block_start)):
            first = int(batch.context_len[row]) // self.block_size
            written = batch.block_ids[a + first : b]
            assert (users[written] == 1).all(), "a written block is in another row, or twice in this one"

    def _write(self, table: npt.NDArray[np.int32], context: int, tokens: list[int], drafts: int) -> None:
        """Only what drafts have left may be written over."""
        size = self.block_size
        value = int(self._values[table[(context - 1) // size], (context - 1) % size]) if context else 1
        for position, token in enumerate(tokens, context):
            block, slot = int(table[position // size]), position % size
            assert slot == 0 or self._firm[block] <= slot <= self._filled[block], (
                "a slot is written again: the block was shared, or freed early"
            )
            poisoned = value == _POISON or token == self.poison_id
            value = _POISON if poisoned else _mix(value ^ _mix(token)) | 1
            self._values[block, slot] = value
            self._filled[block] = slot + 1
            if position < context + len(tokens) - drafts and not self.rewrites:
                self._firm[block] = slot + 1
            elif slot == 0:
                self._firm[block] = 0

    def _sample(self, batch: Batch, tables: list[npt.NDArray[np.int32]]) -> StepResult:
        s = batch.samples
        rows = np.searchsorted(batch.row_start, s.token_index, side="right") - 1
        assert (np.diff(s.token_index) > 0).all(), "samples out of order"
        count, width = len(rows), max([0, *s.logprobs.tolist()])
        result = StepResult(
            np.zeros(count, np.int32),
            np.ones(count, np.bool_),
            np.zeros(count, np.float32),
            np.full((count, width), -1, np.int32),
            np.zeros((count, width), np.float32),
            {},
        )
        for i, row in enumerate(rows.tolist()):
            position = int(batch.context_len[row] + s.token_index[i] - batch.row_start[row])
            state = self._read(tables[row], position + 1)
            self._answer(result, batch, i, state)
        return result

    def _read(self, table: npt.NDArray[np.int32], length: int) -> int:
        """One number that depends on each of the `length` values behind the table; _POISON if the last is."""
        for index in range(-(-length // self.block_size)):
            assert self._filled[table[index]] >= min(self.block_size, length - index * self.block_size), (
                "unwritten"
            )
        values = self._values[table].reshape(-1)[:length]
        if int(values[-1]) == _POISON:
            return _POISON
        return _mix(int((values * self._weights[:length]).sum())) | 1

    def _answer(self, result: StepResult, batch: Batch, i: int, state: int) -> None:
        s = batch.samples
        target = int(s.target_ids[i])
        result.token_ids[i] = target if target >= 0 else self._draw(s, batch.masks, i, state)
        result.finite[i] = state != _POISON and result.token_ids[i] >= 0
        top = int(s.logprobs[i])
        if top >= 0:
            result.logprob[i] = self._logprob(state, int(result.token_ids[i]))
            ranked = [(state + 7 * k) % self.vocab_size for k in range(top)]
            result.top_ids[i, :top] = ranked
            result.top_logprobs[i, :top] = [self._logprob(state, token) for token in ranked]
        if s.want_logits[i]:
            ids = np.arange(self.vocab_size)
            result.logits[i] = np.array([self._logprob(state, int(token)) for token in ids], np.float32)

    def _logprob(self, state: int, token: int) -> float:
        return -(_mix(state ^ token) % 4096) / 256

    def _draw(self, s: SampleColumns, masks: Masks | None, i: int, state: int) -> int:
        position = int(s.position[i])
        allowed = None if masks is None else masks.allowed(i, self.vocab_size)
        if position < len(self.script) and (allowed is None or allowed[self.script[position]]):
            return self.script[position]
        a, b = int(s.history_start[i]), int(s.history_start[i + 1])
        history = sorted(zip(s.history_ids[a:b].tolist(), s.history_counts[a:b].tolist(), strict=True))
        penalties = (s.repetition_penalty[i], s.presence_penalty[i], s.frequency_penalty[i])
        for number in [
            int(s.top_k[i]),
            *(int(1000 * p) for p in penalties),
            *(n for pair in history for n in pair),
        ]:
            state = _mix(state ^ (number & _MASK))
        if s.temperature[i] > 0:
            state = _mix(state ^ _mix(int(s.seed[i]) ^ _mix(position)))
        return self._first_allowed(s, allowed, i, state)

    def _first_allowed(
        self, s: SampleColumns, allowed: npt.NDArray[np.bool_] | None, i: int, state: int
    ) -> int:
        a, b = int(s.bias_start[i]), int(s.bias_start[i + 1])
        banned = set(s.bias_ids[a:b][np.isneginf(s.bias_values[a:b])].tolist())
        if allowed is not None:
            banned |= set(np.flatnonzero(~allowed).tolist())
        token = state % self.vocab_size
        if len(banned) >= self.vocab_size:
            return -1
        while token in banned:
            token = (token + 1) % self.vocab_size
        return token


def _spans(starts: npt.NDArray[np.int32]) -> list[tuple[int, int]]:
    return list(pairwise(starts.tolist()))
