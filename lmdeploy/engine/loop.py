"""The engine: takes requests, plans and runs one step at a time, and says what came of it.

A plain synchronous object: no thread, no clock, no asyncio; whoever owns it calls `step` while `has_work`.
Requests that cannot be served end with an "error" event of their own and never disturb others.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lmdeploy.engine.batch import Batch, Packer, Row, StepResult
from lmdeploy.engine.executor import Executor
from lmdeploy.engine.guided import Guides
from lmdeploy.engine.lanes import held_blocks, long_members
from lmdeploy.engine.limits import check_request
from lmdeploy.engine.prefix_cache import PrefixCache
from lmdeploy.engine.request import Request, Sequence, TokenEvent, TokenLogprobs
from lmdeploy.engine.scheduler import EngineOptions, Scheduler
from lmdeploy.engine.speculation import Speculation
from lmdeploy.engine.stats import StepNotes, StepStats, Totals
from lmdeploy.engine.stopping import finish_reason, stop_id, update_bias
from lmdeploy.errors import EngineDeadError, EngineError, OverloadedError, RequestError, error_kind

__all__ = ["Engine", "EngineOptions"]


class Engine:
    """Serves many requests on one executor. Exactly one event of a request has a finish_reason.

    With `speculation` a step may bring several tokens of a request, the same ones as without. Requests with a
    grammar need `guides`.
    """

    def __init__(
        self,
        executor: Executor,
        options: EngineOptions | None = None,
        speculation: Speculation | None = None,
        guides: Guides | None = None,
    ) -> None:
        options = options or EngineOptions()
        self.executor = executor
        self.batching_window = options.batching_window
        self._speculation = speculation
        self._guides = guides
        self._caps = executor.capabilities()
        self._capacity = self._caps.num_blocks * self._caps.block_size
        self._totals = Totals()
        self._cache = PrefixCache(self._caps.num_blocks, self._caps.block_size, options.enable_prefix_caching)
        self._scheduler = Scheduler(options, self._caps, self._cache, self._totals)
        self._packer = Packer(self._caps.block_size)
        self._most = (
            None
            if options.max_queue is None
            else min(options.max_batch_size, self._caps.max_rows) + options.max_queue
        )
        self._live: dict[str, Sequence] = {}
        self._ended: dict[str, TokenEvent] = {}  # last events of requests that ended between steps
        self._arrivals = 0
        self.notes = StepNotes()

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to tell."""
        return bool(self._live or self._ended)

    @property
    def longest_step(self) -> float:
        """Seconds that a step with all the tokens it may have is expected to take; 0: not known."""
        return self._scheduler.longest_step

    def add(self, request: Request) -> None:
        """Queue a request. One that can never be served ends with an "error" event in the next step.

        Raises EngineError if a request of this id is still unfinished.
        """
        name = request.request_id
        if name in self._live or name in self._ended:
            raise EngineError(
                f"request id {name!r} is already in use; choose another or wait until it has ended"
            )
        try:
            check_request(request, self._caps)
            self._check_queue()
            self._check_grammar(request)
        except (RequestError, OverloadedError) as error:
            self._ended[name] = TokenEvent(
                name, finish_reason="error", error=error.message, error_kind=error_kind(error)
            )
            self._totals.refused += 1
            return
        self._arrivals += 1
        seq = self._live[name] = Sequence(request, self._arrivals)
        update_bias(seq, self._caps.vocab_size)
        if self._guides is not None and request.grammar is not None:
            self._guides.begin(seq, request.grammar)
        else:
            self._scheduler.add(seq)

    def _check_grammar(self, request: Request) -> None:
        if request.grammar is not None and self._guides is None:
            raise RequestError("this engine cannot follow grammars")

    def _check_queue(self) -> None:
        if self._most is not None and len(self._live) >= self._most:
            raise OverloadedError(
                f"the queue is full: {len(self._live)} requests run or wait; try again later"
            )

    def abort(self, request_id: str) -> None:
        """End a request now: its blocks are free on return, its "abort" event comes with the next step.

        Unknown and finished ids are ignored.
        """
        seq = self._live.get(request_id)
        if seq is not None:
            self._remove(seq)
            self._totals.aborted += 1
            event = TokenEvent(request_id, finish_reason="abort", cached_tokens=seq.cached_tokens)
            self._ended[request_id] = event

    def step(self) -> list[TokenEvent]:
        """Run one batch and return what it produced, first the ends that came about since the last step.

        An EngineError of the executor ends the requests of that batch only; EngineDeadError passes through.
        """
        events = list(self._ended.values())
        self._ended.clear()
        if self._guides is not None:
            events += self._admit_guided(self._guides)
        rows = self._scheduler.plan()
        self.notes = StepNotes(0, self._scheduler.bound, tuple(self._scheduler.started))
        if not rows:
            if self._guides is not None and not events:
                self._guides.wait()
            return events
        if self._speculation is not None:
            rows = self._speculation.extend(rows, self._scheduler)
        batch = self._packer.pack(rows, self._guides.masks(rows) if self._guides is not None else None)
        self._totals.steps += 1
        self.notes.tokens = batch.num_tokens
        try:
            result = self._execute(batch)
        except EngineDeadError:
            raise
        except EngineError as error:
            return events + [self._fail(seq, error.message) for seq, _ in rows]
        self._totals.computed_tokens += batch.num_tokens
        return events + self._commit(rows, result)

    def close(self) -> None:
        """Free executor and draft model; further calls are errors."""
        self.executor.close()
        if self._speculation is not None:
            self._speculation.close()
        if self._guides is not None:
            self._guides.close()

    def stats(self) -> StepStats:
        pool, size = self._cache.pool, self._caps.block_size
        running, waiting = self._scheduler.running, self._scheduler.waiting
        long = long_members(running)
        return StepStats(
            running=len(running),
            waiting=len(waiting),
            blocks_total=pool.num_blocks,
            blocks_free=pool.num_free,
            blocks_held=pool.num_held,
            blocks_cached=pool.num_cached,
            unused_tokens=sum(s.num_blocks * size - s.num_computed for s in running),
            long_running=len(long),
            long_waiting=len(long_members(waiting)),
            long_blocks=held_blocks(long, []),
            totals=replace(self._totals),
        )

    def _execute(self, batch: Batch) -> StepResult:
        try:
            if self._speculation is None:
                return self.executor.execute(batch)
            with self._speculation.measured(batch):
                return self.executor.execute(batch)
        finally:
            if batch.masks is not None:
                batch.masks.wait()  # an executor that failed may not have: guides are free only then

    def _admit_guided(self, guides: Guides) -> list[TokenEvent]:
        """Schedule requests whose grammar is compiled; last events of those whose grammar is none."""
        failed = []
        for seq, error in guides.ready():
            if error is None:
                self._scheduler.add(seq)
            else:
                failed.append(self._fail(seq, error.message, error_kind(error)))
        return failed

    def _commit(self, rows: list[Row], result: StepResult) -> list[TokenEvent]:
        events = []
        tokens, finite = result.token_ids.tolist(), result.finite.tolist()
        all_finite = all(finite)
        first = 0
        for seq, num_new in rows:
            drafts = max(seq.num_computed + num_new - seq.length, 0)
            draws = seq.num_computed + num_new >= seq.length
            drawn = first + len(seq.scored_positions(num_new)) if seq.scores_prompt else first
            problem = seq.guide.error if seq.guide is not None else None
            # What comes of a draft matters only if the draft is right.
            if problem is not None:
                events.append(self._fail(seq, problem, "RequestError"))
            elif all_finite or all(finite[first : drawn + draws]):
                if drawn > first:
                    self._score(seq, result, range(first, drawn))
                self._advance(seq, num_new - drafts)
                if draws:
                    events.append(self._accept(seq, result, drawn, tokens[drawn : drawn + 1 + drafts]))
            else:
                self._cache.retract(seq)
                events.append(self._fail(seq, _no_token(seq)))
            first = drawn + draws + drafts
        return events

    def _score(self, seq: Sequence, result: StepResult, samples: range) -> None:
        top = seq.request.prompt_logprobs or 0
        seq.prompt_scores += [_logprobs(result, sample, top) for sample in samples]

    def _advance(self, seq: Sequence, num_new: int) -> None:
        seq.num_computed += num_new
        if seq.num_computed >= (seq.num_published + 1) * self._caps.block_size:
            self._cache.publish(seq)

    def _accept(self, seq: Sequence, result: StepResult, first: int, drawn: list[int]) -> TokenEvent:
        """Take what was drawn, samples `first` and on, into the sequence and end it if a rule says so."""
        event = TokenEvent(seq.request.request_id, cached_tokens=seq.cached_tokens)
        if seq.length == seq.num_prompt:
            event.prompt_logprobs = tuple(seq.prompt_scores)
        if seq.request.max_new_tokens == 0:  # the prompt was only to be scored
            event.finish_reason = "length"
        else:
            drafts = []
            if len(drawn) > 1:  # read before the first drawn token takes the first draft's place
                drafts = seq.tokens[seq.length : seq.length + len(drawn) - 1].tolist()
            self._append(seq, result, first, drawn[0], event)
            if drafts:
                self._accept_drafts(seq, drafts, result, first + 1, drawn[1:], event)
        if event.finish_reason is not None:
            self._remove(seq)
            self._totals.finished += 1
        return event

    def _accept_drafts(
        self,
        seq: Sequence,
        drafts: list[int],
        result: StepResult,
        first: int,
        drawn: list[int],
        event: TokenEvent,
    ) -> None:
        """What was drawn at a draft counts if each draft so far is the token drawn in its place."""
        length = seq.length
        for sample, (draft, token) in enumerate(zip(drafts, drawn, strict=True), first):
            if event.finish_reason is not None or seq.last_token != draft or not result.finite[sample]:
                break
            self._advance(seq, 1)
            self._append(seq, result, sample, token, event)
        accepted = seq.length - length
        event.drafted_tokens, event.accepted_tokens = len(drafts), accepted
        self._totals.drafted_tokens += len(drafts)
        self._totals.accepted_tokens += accepted
        if self._speculation is not None:
            self._speculation.settle(seq, len(drafts), accepted)

    def _append(self, seq: Sequence, result: StepResult, sample: int, token: int, event: TokenEvent) -> None:
        request = seq.request
        seq.append_token(token)
        if seq.bias is not None:
            update_bias(seq, self._caps.vocab_size)
        self._totals.generated_tokens += 1
        event.token_ids += (token,)
        if request.sampling.logprobs is not None:
            event.logprobs += (_logprobs(result, sample, request.sampling.logprobs),)
        if request.want_logits:
            row = result.logits[sample][None]
            event.logits = row if event.logits is None else np.concatenate([event.logits, row])
        if seq.guide is not None:
            seq.guide.advance(token)
        event.finish_reason = finish_reason(seq, self._capacity)
        if event.finish_reason == "stop":
            event.stop_id = stop_id(seq)

    def _fail(self, seq: Sequence, reason: str, kind: str = "EngineError") -> TokenEvent:
        self._remove(seq)
        self._totals.failed += 1
        name = seq.request.request_id
        return TokenEvent(
            name, finish_reason="error", error=reason, error_kind=kind, cached_tokens=seq.cached_tokens
        )

    def _remove(self, seq: Sequence) -> None:
        del self._live[seq.request.request_id]
        if self._speculation is not None:
            self._speculation.forget(seq)
        if self._guides is None or not self._guides.forget(seq):
            self._scheduler.remove(seq)


def _no_token(seq: Sequence) -> str:
    if seq.guide is None:
        return "the model produced NaN or infinity for this request"
    return "no token is left that the grammar allows and nothing bans (or the model produced NaN or infinity)"


def _logprobs(result: StepResult, sample: int, top: int) -> TokenLogprobs:
    return TokenLogprobs(
        int(result.token_ids[sample]),
        float(result.logprob[sample]),
        tuple(result.top_ids[sample, :top].tolist()),
        tuple(result.top_logprobs[sample, :top].tolist()),
    )
