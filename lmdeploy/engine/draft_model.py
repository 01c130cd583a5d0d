"""Drafts from a second, smaller model of the same vocabulary, with an executor and cache blocks of its own.

It says what it would say in the place of the first one: with the same sampling, bans, penalties and random
numbers, so that both draw the same where they think alike. Each sequence has a shadow here, which catches up
with what was really drawn before it goes on with drafts; keys and values of drafts that proved right are
kept.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lmdeploy.engine.batch import Packer, Row
from lmdeploy.engine.executor import Executor
from lmdeploy.engine.prefix_cache import PrefixCache
from lmdeploy.engine.request import Sequence
from lmdeploy.engine.speculation import Lead
from lmdeploy.engine.stopping import Bias
from lmdeploy.errors import EngineDeadError, EngineError

# Tokens to catch up with. More of them are read in a step without drafts, and so are in no draft's cost.
_AT_ONCE = 64


class DraftModel:
    """A `speculation.Proposer`. A sequence for which its cache or a step has no room gets no drafts for now.

    `vocab_size` is the first model's: of two models with one vocabulary either may have more rows, for
    padding.
    """

    num_kinds = 1

    def __init__(self, executor: Executor, enable_prefix_caching: bool, vocab_size: int) -> None:
        self.executor = executor
        self._caps = executor.capabilities()
        self._vocab_size = min(vocab_size, self._caps.vocab_size)
        self.cache = PrefixCache(self._caps.num_blocks, self._caps.block_size, enable_prefix_caching)
        self._packer = Packer(self._caps.block_size)
        self._shadows: dict[Sequence, Sequence] = {}

    def find(self, seq: Sequence) -> Lead | None:
        """There is always something to say."""
        return Lead(seq, 0)

    def propose(self, wanted: list[tuple[Lead, int]]) -> list[list[int]]:
        """One step of the draft model for each further draft, after one that catches up."""
        drafts: dict[Sequence, list[int]] = {}
        counts: dict[Sequence, int] = {}
        rows: list[Row] = []
        room = self._caps.max_step_tokens
        for lead, count in wanted[: self._caps.max_rows]:
            shadow = self._caught_up(lead.seq, count) if room else None
            if shadow is not None:
                left = shadow.length - shadow.num_computed
                drafts[shadow], counts[shadow] = [], count if left <= _AT_ONCE else 0
                rows.append((shadow, min(left, room)))
                room -= rows[-1][1]
        lengths = {shadow: shadow.length for shadow in drafts}
        try:
            while rows:
                rows = self._step(rows, drafts, counts)
        except EngineDeadError:
            raise
        except EngineError:  # it costs the drafts of this step, nothing that anybody reads
            drafts = {}
        for shadow, length in lengths.items():
            self._take_back(shadow, length)
        return [drafts.get(self._shadows.get(lead.seq, lead.seq), []) for lead, _ in wanted]

    def _step(
        self, rows: list[Row], drafts: dict[Sequence, list[int]], counts: dict[Sequence, int]
    ) -> list[Row]:
        """Compute rows and take what they draw; the rows of the next step."""
        result = self.executor.execute(self._packer.pack(rows))
        sample, more = 0, []
        for shadow, num_new in rows:
            draws = shadow.num_draws(num_new)
            shadow.num_computed += num_new
            if not drafts[shadow]:  # what was computed are real tokens
                self.cache.publish(shadow)
            if draws and not result.finite[sample]:
                self.cache.retract(shadow)
            elif draws and counts[shadow] and int(result.token_ids[sample]) < self._vocab_size:
                shadow.append_token(int(result.token_ids[sample]))
                drafts[shadow].append(shadow.last_token)
                if len(drafts[shadow]) < counts[shadow]:
                    more.append((shadow, 1))
            sample += draws
        return more

    def _caught_up(self, seq: Sequence, count: int) -> Sequence | None:
        """The shadow with all real tokens and blocks for `count` drafts; None when that is not possible."""
        shadow = self._shadows.get(seq)
        if seq.tokens[shadow.length if shadow else 0 : seq.length].max() >= self._vocab_size:
            return None
        if shadow is None:
            shadow = self._shadows[seq] = self._shadow(seq)
        self._follow(shadow, seq)
        lacking = -(-(seq.length + count - 1) // self._caps.block_size) - shadow.num_blocks
        if lacking > self.cache.pool.num_available:
            return None
        if lacking > 0:
            shadow.append_blocks(self.cache.pool.allocate(lacking))
        return shadow

    def _shadow(self, seq: Sequence) -> Sequence:
        sampling = replace(seq.request.sampling, logprobs=None)
        request = replace(
            seq.request, sampling=sampling, prompt_logprobs=None, want_logits=False, grammar=None
        )
        shadow = Sequence(request, seq.order)
        found = self.cache.lookup(shadow) or []
        self.cache.pool.retain(found)
        shadow.append_blocks(found)
        shadow.num_published = len(found)
        shadow.num_computed = len(found) * self._caps.block_size
        return shadow

    def _follow(self, shadow: Sequence, seq: Sequence) -> None:
        """Take the tokens drawn since; what is computed of wrong drafts will be written over."""
        new = seq.tokens[shadow.length : seq.length]
        guessed = shadow.tokens[shadow.length : shadow.length + len(new)]
        wrong = np.flatnonzero(guessed != new[: len(guessed)])
        right = shadow.length + (int(wrong[0]) if len(wrong) else len(guessed))
        for token in new.tolist():
            shadow.append_token(token)
        shadow.bias = self._bias(seq)
        shadow.num_computed = min(shadow.num_computed, right, shadow.length - 1)

    def _bias(self, seq: Sequence) -> Bias | None:
        if seq.bias is None:
            return None
        ids, values = seq.bias
        known = ids < self._vocab_size
        return ids[known], values[known]

    def _take_back(self, shadow: Sequence, length: int) -> None:
        """Leave drafts behind the last real token, where `_follow` compares them, but count them no more."""
        if shadow.history is not None:
            shadow.history.take_back(shadow.tokens[length : shadow.length].tolist())
        shadow.length = length

    def close(self) -> None:
        """Free the draft model."""
        self.executor.close()

    def forget(self, seq: Sequence) -> None:
        """Release the blocks of a sequence that has ended."""
        shadow = self._shadows.pop(seq, None)
        if shadow is not None:
            self.cache.pool.release(shadow.drop_blocks())
