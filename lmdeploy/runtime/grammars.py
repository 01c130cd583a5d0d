"""Grammars of one vocabulary, compiled and followed with llguidance: `engine.guided.Grammars`.

Owns the threads: some that compile, one that writes masks while the executor computes. llguidance works
without the interpreter's lock. The vocabulary is read when the first grammar comes.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from lmdeploy.engine.batch import U32
from lmdeploy.engine.guided import Compilation, Job
from lmdeploy.engine.request import Grammar, Guide
from lmdeploy.errors import InvalidValueError, LMDeployError, RequestError
from lmdeploy.runtime.structured import compiled_form, limits
from lmdeploy.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # importing it takes time that only users of grammars should wait
    import llguidance

_KEPT = 64  # compiled grammars, and the characters of all their texts
_KEPT_CHARACTERS = 4 << 20


class _Vocabulary:
    """The tokenizer as llguidance takes it."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eos_ids)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [
            tokenizer.token_bytes(i) for i in range(vocab_size)
        ]  # nothing for rows without a token
        self.special_token_ids = sorted(tokenizer.special_ids)

    def __call__(self, text: str) -> Sequence[int]:
        return self._tokenizer.encode(text)


def read_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> llguidance.LLTokenizer:
    """Some tenths of a second. `vocab_size`: rows of the model's embedding, at least the tokenizer's."""
    if not tokenizer.eos_ids:
        raise RequestError("this model names no token that ends an answer, so no grammar can be ended")
    import llguidance

    return llguidance.LLTokenizer(
        _Vocabulary(tokenizer, vocab_size),  # type: ignore[arg-type]
        eos_token=sorted(tokenizer.eos_ids),
    )


class _Guide:
    """One answer's place in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, end_ids: frozenset[int]) -> None:
        self.matcher, self.end_ids = matcher, end_ids
        self.broken: str | None = None  # why it got no mask

    def advance(self, token_id: int) -> None:
        self.matcher.consume_token(token_id)

    @property
    def ended(self) -> bool:
        return self.matcher.is_stopped()

    @property
    def error(self) -> str | None:
        problem = _line(self.matcher) if self.matcher.is_error() else self.broken
        return problem and f"the grammar cannot be followed: {problem}"

    def fitting(self, token_ids: list[int]) -> int:
        return self.matcher.validate_tokens(token_ids)


class _Compiled:
    """A grammar's beginning, to be copied for each answer."""

    def __init__(self, future: Future[llguidance.LLMatcher], end_ids: Callable[[], frozenset[int]]) -> None:
        self.future, self._end_ids = future, end_ids

    def done(self) -> bool:
        return self.future.done()

    def guide(self) -> Guide:
        try:
            matcher = self.future.result()
        except LMDeployError as error:
            raise RequestError(error.message) from None
        return _Guide(matcher.deep_copy(), self._end_ids())


class LLGrammars:
    """Implements `engine.guided.Grammars`. `tokenizer` is called once, on another thread."""

    def __init__(self, tokenizer: Callable[[], Tokenizer], vocab_size: int) -> None:
        self._load, self._vocab_size = tokenizer, vocab_size
        self._known: OrderedDict[Grammar, _Compiled] = OrderedDict()
        self._lock = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._end_ids: frozenset[int] = frozenset()
        free = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        self._compilers = ThreadPoolExecutor(2, "grammar", _run_anywhere, (free,))
        self._filler = ThreadPoolExecutor(1, "masks", _run_anywhere, (free,))
        self._masks: llguidance.LLExecutor | None = None

    def compile(self, grammar: Grammar) -> Compilation:
        known = self._known.get(grammar)
        if known is None:
            future = self._compilers.submit(self._compile, grammar)
            known = self._known[grammar] = _Compiled(future, lambda: self._end_ids)
            self._forget_oldest()
        self._known.move_to_end(grammar)
        return known

    def _forget_oldest(self) -> None:
        while len(self._known) > _KEPT or sum(len(g.text) for g in self._known) > _KEPT_CHARACTERS:
            self._known.popitem(last=False)

    def _compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        import llguidance

        vocabulary = self._read()
        try:
            form = compiled_form(grammar)
        except ValueError as error:
            raise InvalidValueError(f"the grammar cannot be read: {error}") from None
        matcher = llguidance.LLMatcher(vocabulary, form, log_level=0, limits=limits())
        if matcher.is_error():
            raise InvalidValueError(f"the grammar cannot be followed: {_line(matcher)}")
        matcher.deep_copy().compute_bitmask()  # the states of the first mask are kept for all answers
        return matcher

    def _read(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                tokenizer = self._load()
                self._vocabulary = read_vocabulary(tokenizer, self._vocab_size)
                self._end_ids = tokenizer.eos_ids
            return self._vocabulary

    def wait(self, compilations: list[Compilation], seconds: float) -> None:
        wait([c.future for c in compilations if isinstance(c, _Compiled)], seconds, FIRST_COMPLETED)

    def fill(self, jobs: list[Job], bits: U32) -> Callable[[], None]:
        own = [(guide, row, drafts) for guide, row, drafts in jobs if isinstance(guide, _Guide)]
        future = self._filler.submit(self._fill, own, bits)

        def wait_for_it() -> None:
            problem = future.exception()
            for guide, _, _ in own if problem is not None else ():
                guide.broken = str(problem)

        return wait_for_it

    def _fill(self, jobs: list[tuple[_Guide, int, list[int]]], bits: U32) -> None:
        import llguidance

        if self._masks is None:
            self._masks = llguidance.LLExecutor(1)
        address, width, rows = bits.ctypes.data, bits.shape[1] * 4, len(bits)
        plain = [(guide.matcher, row) for guide, row, drafts in jobs if not drafts]
        if plain:
            self._masks.unsafe_compute_mask_ptr(plain, address, width, rows)
        drafted = [(guide.matcher, row, drafts) for guide, row, drafts in jobs if drafts]
        if drafted:
            self._masks.unsafe_compute_mask_ptr_with_draft_token(drafted, address, width, rows)

    def close(self) -> None:
        """Compilations that have not begun are given up."""
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self._filler.shutdown(wait=True)


def _run_anywhere(cpus: set[int] | None) -> None:
    """Threads are born on the processor of the one that made them, where the engine computes."""
    if cpus is not None:
        os.sched_setaffinity(0, cpus)


def _line(matcher: llguidance.LLMatcher) -> str:
    return " ".join(matcher.get_error().split())[:400]
