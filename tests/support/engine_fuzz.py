"""The fuzz of the engine core: random traffic over the fake executor, checked after every step.

Oracles, none of them the code under test in the same situation: each request's solo run in a fresh engine
without prefix cache; a recount of references from the sequences' tables; the longest prefix that any earlier
request of the same salt shares; progress of the first request and of every decoding one in every step; the
bounds of the long lane, and the share that neither lane loses.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields

import numpy as np
from draft_guesses import Guesses, Wavering, count_drafts
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lmdeploy.engine.batch import Batch, Row
from lmdeploy.engine.draft_model import DraftModel
from lmdeploy.engine.fake import FakeExecutor
from lmdeploy.engine.lanes import LaneOptions
from lmdeploy.engine.loop import Engine, EngineOptions
from lmdeploy.engine.request import Request, SamplingParams, Sequence, TokenEvent
from lmdeploy.engine.speculation import Speculation
from lmdeploy.engine.stats import Totals
from lmdeploy.engine.step_cost import StepCost
from lmdeploy.errors import EngineError

VOCAB = 97
POISON = 96
BROKEN = "injected failure"


@dataclass(frozen=True)
class Case:
    """One scenario. Arrivals, aborts and executor failures happen before the step of their number."""

    block_size: int
    num_blocks: int
    max_step_tokens: int
    max_rows: int
    options: EngineOptions
    drafts: int  # most a sequence gets in a step; 0: no speculation
    draft_blocks: int  # of a draft model's cache; 0: drafts come from the truth, with faults
    arrivals: tuple[tuple[int, Request], ...]
    aborts: tuple[tuple[int, str], ...]
    failures: frozenset[int]

    def executor(self) -> FakeExecutor:
        return FakeExecutor(
            self.block_size, self.num_blocks, self.max_step_tokens, self.max_rows, VOCAB, 3, poison_id=POISON
        )


@dataclass
class Outcome:
    """All that a request's events said."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    prompt_logprobs: list[object] = field(default_factory=list)
    logits: list[list[float]] = field(default_factory=list)
    end: tuple[str, int | None, str | None] | None = None

    def take(self, event: TokenEvent) -> None:
        assert self.end is None, "an event after the last one"
        self.tokens += event.token_ids
        self.logprobs += event.logprobs
        self.prompt_logprobs += event.prompt_logprobs
        if event.logits is not None:
            self.logits += event.logits.tolist()
        if event.finish_reason is not None:
            self.end = (event.finish_reason, event.stop_id, event.error)

    def agrees_with(self, solo: Outcome) -> bool:
        """Equal, or a beginning of it if the request was aborted or the executor failed."""
        assert self.end is not None, "a request without an end"
        if self.end[0] != "abort" and self.end[2] != BROKEN:
            return self == solo
        n = len(self.tokens)
        cut = (solo.tokens[:n], solo.logprobs[: len(self.logprobs)], solo.logits[: len(self.logits)])
        return cut == (self.tokens, self.logprobs, self.logits)


_STEMS = [
    (1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3),
    (9, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3),
    (5,) * 12,
    (1, 2, 3, 5, 5, 5),
]


@st.composite
def requests(draw: st.DrawFn, number: int) -> Request:
    stem = draw(st.sampled_from(_STEMS))[: draw(st.sampled_from([0, 3, 7, 12, 12, 12]))]
    tail = draw(st.lists(st.integers(0, 4), min_size=0 if stem else 1, max_size=6))
    if draw(st.integers(0, 30)) == 0:
        tail = [*tail, POISON]
    if draw(st.integers(0, 25)) == 0:
        tail = tail * 20
    prompt = np.array([*stem, *tail, *([0] if not stem and not tail else [])], np.int32)
    plain = draw(st.booleans())
    sampling = SamplingParams(seed=number) if plain else draw(_samplings())
    return Request(
        request_id=f"r{number}",
        prompt_ids=prompt,
        max_new_tokens=draw(st.integers(1, 18)),
        sampling=sampling,
        stop_ids=frozenset() if plain else frozenset(draw(st.sets(st.integers(0, 9), max_size=2))),
        min_new_tokens=0 if plain else draw(st.integers(0, 5)),
        cache_salt=draw(st.sampled_from(["", "", "", "x"])),
        prompt_logprobs=draw(st.sampled_from([None] * 7 + [0, 2])),
        want_logits=not plain and draw(st.booleans()),
        streams=draw(st.booleans()),
        priority=draw(st.sampled_from([0, 0, 0, 0, 1, -3])),
        account=draw(st.sampled_from(["", "", "a", "b"])),
    )


def _samplings() -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.8]),
        top_k=st.sampled_from([0, 4]),
        repetition_penalty=st.sampled_from([1.0, 1.1]),
        presence_penalty=st.sampled_from([0.0, 0.5]),
        seed=st.integers(0, 2**64 - 1),
        logit_bias=st.sampled_from([(), ((3, float("-inf")), (1, 2.0))]),
        logprobs=st.sampled_from([None, 0, 3]),
    )


_LANES = (None, None, LaneOptions(5, 0.25, 0.5), LaneOptions(9, 0.6, 0.3))
_COSTS = (None, StepCost((1, 8), (1.0, 1.5)), StepCost((1, 2, 8), (1.0, 3.0, 9.0), 0.1))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    count = draw(st.integers(1, 10))
    burst = draw(st.sampled_from([0, 3, 12]))
    arrivals = [(draw(st.integers(0, burst)), draw(requests(i))) for i in range(count)]
    aborts = draw(st.lists(st.tuples(st.integers(0, 25), st.integers(0, 11)), max_size=4))
    options = EngineOptions(
        max_batch_size=draw(st.integers(1, 8)),
        max_prefill_token_num=draw(st.sampled_from([1, 3, 8, 20, 64, 64])),
        enable_prefix_caching=draw(st.integers(0, 5)) > 0,
        step_cost=draw(st.sampled_from(_COSTS)),
        lanes=draw(st.sampled_from(_LANES)),
    )
    block_size = draw(st.sampled_from([1, 2, 4]))
    drafts = draw(st.sampled_from([0, 0, 1, 3, 7]))
    return Case(
        block_size=block_size,
        num_blocks=draw(st.integers(16, 72)) // block_size,
        max_step_tokens=draw(st.sampled_from([2, 6, 24, 128])),
        max_rows=draw(st.integers(2, 8)),
        options=options,
        drafts=drafts,
        draft_blocks=draw(st.sampled_from([0, 0, 5, 30])) if drafts else 0,
        arrivals=tuple(sorted(arrivals, key=lambda a: a[0])),
        aborts=tuple((step, f"r{number}") for step, number in aborts),
        failures=frozenset(draw(st.lists(st.integers(0, 160), max_size=1))),
    )


class Run:
    """One case on one engine, with every check after every step."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.now = 0
        executor = case.executor()
        executor.on_step = self._on_step
        guesses = Guesses(lambda request: solo(case, request).tokens, case.drafts)
        self.model = self._draft_model() if case.draft_blocks else None
        speculation = Speculation(self.model or guesses, guesses) if case.drafts else None
        self.engine = Engine(executor, case.options, speculation)
        self._plan = self.engine._scheduler.plan
        self.engine._scheduler.plan = self._checked_plan  # type: ignore[method-assign]
        self.outcomes: dict[str, Outcome] = {}
        self.seen: list[tuple[str, list[int]]] = []  # (salt, prompt) of every request so far, in order
        self.requests: dict[str, Request] = {}

    def play(self) -> Totals:
        last = max(step for step, _ in self.case.arrivals)
        while self.now <= last or self.engine.has_work:
            for step, request in self.case.arrivals:
                if step == self.now:
                    self._add(request)
            for step, name in self.case.aborts:
                if step == self.now:
                    self.engine.abort(name)
                    self._check_references()
            self._step()
            self.now += 1
            assert self.now < 2000, "the engine does not come to an end"
        stats = self.engine.stats()
        assert stats.blocks_held == stats.running == stats.waiting == 0, "something is left"
        for name, request in self.requests.items():
            assert self.outcomes[name].agrees_with(solo(self.case, request)), (
                f"{name} differs from its solo run"
            )
        return stats.totals

    def _draft_model(self) -> DraftModel:
        case = self.case
        executor = Wavering(
            case.block_size,
            case.draft_blocks,
            case.max_step_tokens,
            case.max_rows,
            VOCAB,
            poison_id=POISON,
            rewrites=True,
        )
        return DraftModel(executor, case.options.enable_prefix_caching, VOCAB)

    def _add(self, request: Request) -> None:
        self.engine.add(request)
        self.requests[request.request_id] = request
        self.outcomes[request.request_id] = Outcome()

    def _step(self) -> None:
        scheduler = self.engine._scheduler
        live = scheduler.running + scheduler.waiting
        firsts = self._firsts(live)
        before = [seq.num_computed for seq in firsts]
        had_blocks = set(scheduler.running)
        decoding = [seq for seq in scheduler.running if seq.length - seq.num_computed == 1]
        events = self.engine.step()
        for event in events:
            self._check_cached(event)
            self.outcomes[event.request_id].take(event)
        self._check_references()
        self._check_lane()
        for seq in set(scheduler.running) - had_blocks:
            for other in scheduler.waiting:
                same = other.is_long == seq.is_long
                line = self._line(other) != self._line(seq) or other.order > seq.order
                behind = other.rank > seq.rank and line
                assert behind or not same or other.wait_key, "a request was overtaken"
        heard = {event.request_id for event in events}
        waiting = scheduler.waiting
        for seq in decoding:
            assert seq.request.request_id in heard or seq in waiting, "a stream stood still"
        if firsts and all(seq.request.request_id in self.engine._live for seq in firsts):
            moved = [seq.num_computed > done for seq, done in zip(firsts, before, strict=True)]
            assert any(moved), "the first request stood still"

    def _line(self, seq: Sequence) -> tuple[int, str]:
        request = self.requests[seq.request.request_id]
        return request.priority, request.account

    def _firsts(self, live: list[Sequence]) -> list[Sequence]:
        """The one request that must get on now, or all of which one must: nobody has chosen from them yet."""
        best = [s for s in live if self._line(s)[0] == min(self._line(s)[0] for s in live)]
        taken = [seq for seq in best if seq.rank[1] == 0]
        return [min(taken, key=lambda seq: seq.rank)] if taken else best

    def _checked_plan(self) -> list[Row]:
        rows = self._plan()
        options, planned = self.case.options, dict(rows)
        prompts = [seq for seq in self.engine._scheduler.running if seq.length - seq.num_computed > 1]
        lanes = [[seq for seq in prompts if seq.is_long == lane] for lane in (False, True)]
        if options.lanes is None:
            assert not lanes[1], "a long lane without lanes"
            return rows
        tokens = sum(planned.get(seq, 0) for seq in lanes[1])
        share = options.lanes.step_share * options.max_prefill_token_num
        assert tokens <= max(1, share), "the long lane has more of the step than its share"
        decoding = len(self.engine._scheduler.running) - len(prompts)
        if min(options.max_prefill_token_num, self.case.max_step_tokens - decoding) > 1:
            for lane in filter(None, lanes):
                assert lane[0] in planned, "a lane stood still"
        return rows

    def _check_lane(self) -> None:
        options = self.case.options
        long = [seq for seq in self.engine._scheduler.running if seq.is_long]
        if options.lanes is None or len(long) < 2:
            return
        rows = min(options.max_batch_size, self.case.max_rows, self.case.max_step_tokens)
        assert len(long) <= options.lanes.cache_share * rows, "more rows than the long lane's share"
        held = {block for seq in long for block in seq.block_ids[: seq.num_blocks].tolist()}
        share = options.lanes.cache_share * self.case.num_blocks
        assert len(held) <= share, "more blocks than the long lane's share"

    def _on_step(self, batch: Batch) -> None:
        new = np.diff(batch.row_start) - count_drafts(batch)
        assert batch.num_rows <= self.case.options.max_batch_size, "more rows than max_batch_size"
        assert new[new > 1].sum() <= self.case.options.max_prefill_token_num, "prefill beyond its budget"
        if self.now in self.case.failures:
            raise EngineError(BROKEN)

    def _check_references(self) -> None:
        stats, scheduler, pool = self.engine.stats(), self.engine._scheduler, self.engine._cache.pool
        assert stats.blocks_free + stats.blocks_held + stats.blocks_cached == stats.blocks_total
        pool.check()
        tables = [seq.block_ids[: seq.num_blocks].tolist() for seq in scheduler.running]
        counted = Counter(block for table in tables for block in table)
        assert dict(counted) == {b: n for b, n in enumerate(pool._refs) if n}, "references miscounted"
        assert all(seq.num_blocks == 0 for seq in scheduler.waiting), "a waiting sequence holds blocks"
        if self.model is not None:
            self._check_draft_model(self.model)
        for seq in scheduler.running:
            self._check_isolation(seq, scheduler.running)

    def _check_draft_model(self, model: DraftModel) -> None:
        pool, shadows = model.cache.pool, model._shadows
        pool.check()
        counted = Counter(b for seq in shadows.values() for b in seq.block_ids[: seq.num_blocks].tolist())
        assert dict(counted) == {b: n for b, n in enumerate(pool._refs) if n}, "draft blocks miscounted"
        assert set(shadows) <= set(self.engine._live.values()), "a draft of a request that has ended"

    def _check_isolation(self, seq: Sequence, running: list[Sequence]) -> None:
        mine = set(seq.block_ids[: seq.num_blocks].tolist())
        for other in running:
            if other.request.cache_salt != seq.request.cache_salt:
                assert not mine & set(other.block_ids[: other.num_blocks].tolist()), "shared across salts"

    def _check_cached(self, event: TokenEvent) -> None:
        request = self.requests[event.request_id]
        assert event.cached_tokens < len(request.prompt_ids) or not event.cached_tokens, (
            "no prompt token computed"
        )
        mine = request.prompt_ids.tolist()
        others = [
            other.prompt_ids.tolist() + self.outcomes[name].tokens
            for name, other in self.requests.items()
            if name != event.request_id and other.cache_salt == request.cache_salt
        ]
        assert event.cached_tokens <= max([0, *(_common(mine, other) for other in others)]), (
            "cached what nobody had"
        )


def _common(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def solo(case: Case, request: Request) -> Outcome:
    """What the request yields alone, on a fresh engine that caches nothing."""
    options = EngineOptions(1, case.options.max_prefill_token_num, enable_prefix_caching=False)
    engine = Engine(case.executor(), options)
    engine.add(request)
    outcome = Outcome()
    while engine.has_work:
        for event in engine.step():
            outcome.take(event)
    return outcome


def fuzz(examples: int) -> Totals:
    """Play `examples` cases, always the same ones; raises on the first bad one. Sums their totals."""
    total = Totals()

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def play(case: Case) -> None:
        totals = Run(case).play()
        for name in (f.name for f in fields(Totals)):
            setattr(total, name, getattr(total, name) + getattr(totals, name))

    play()
    return total
