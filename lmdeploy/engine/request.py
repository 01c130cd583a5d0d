"""What a user asked (`Request`, immutable) and what the engine knows about it (`Sequence`, mutable).

Knows token ids and numbers only: no text, no tokenizer, no wire format, no model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn from the logits of one sequence.

    Order of application: `logit_bias` and bans, then repetition, presence and frequency penalties, then
    temperature, then top_k, top_p, min_p (each on the distribution the previous one left; min_p is relative
    to the largest probability after temperature). `temperature` 0 is greedy whatever the other fields say.
    """

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # once per distinct id of prompt and output
    presence_penalty: float = 0.0  # output only
    frequency_penalty: float = 0.0  # output only
    seed: int = 0  # unsigned 64 bit; the draw depends on (seed, number of tokens generated so far) only
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias); -inf bans
    allowed_ids: tuple[int, ...] | None = None  # all other ids are banned
    logprobs: int | None = None  # None: none; k >= 0: of the chosen token and the k most likely ones


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the text of an answer must be. Equal grammars are compiled once.

    `text`: a JSON Schema; a regular expression for the whole answer; or a Lark grammar with the extensions of
    llguidance.
    """

    kind: Literal["json_schema", "regex", "lark"]
    text: str


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue. Lengths are in tokens."""

    request_id: str
    prompt_ids: npt.NDArray[np.int32]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()  # end generation; the id is reported, its text is not printed
    min_new_tokens: int = 0  # stop_ids are banned until this many tokens exist
    cache_salt: str = ""  # requests of different salts never share cached blocks
    prompt_logprobs: int | None = (
        None  # score the prompt: log-probability of each prompt token, top-k beside it
    )
    repetition: tuple[int, int] | None = None  # (n, times): end when the last n tokens have come so often
    want_logits: bool = False  # return the raw logits of each generated token (float32 [vocab])
    grammar: Grammar | None = None  # the answer is a text of it and ends where it must
    streams: bool = False  # somebody reads along: prompts beside it are computed in small pieces
    priority: int = 0  # smaller ones go first, and take the place of larger ones where there is too little
    account: str = ""  # whom it is counted for: accounts that wait are served equally


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-softmax of the raw logits for one position."""

    token_id: int
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(slots=True)  # not frozen: that would cost a microsecond for each row of each step
class TokenEvent:
    """What one engine step produced for one request; not to be changed by its readers."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[
        TokenLogprobs, ...
    ] = ()  # with the first generated token; for prompt positions 1..n-1
    logits: npt.NDArray[np.float32] | None = None  # [len(token_ids), vocab] when the request wants logits
    finish_reason: FinishReason | None = None
    stop_id: int | None = None  # the stop id that ended it, when finish_reason is "stop"
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    drafted_tokens: int = 0  # drafts computed in this step
    accepted_tokens: int = 0  # those of them that are among token_ids
    error: str | None = None  # one line, when finish_reason is "error"
    error_kind: str = "EngineError"  # the class of that error in lmdeploy.errors; RequestError: the caller's


class Guide(Protocol):
    """Where one sequence is in its grammar."""

    end_ids: frozenset[int]  # tokens that end an answer where the grammar may end

    def advance(self, token_id: int) -> None:
        """A token was drawn."""
        ...

    @property
    def ended(self) -> bool:
        """Whether nothing more can follow."""
        ...

    @property
    def error(self) -> str | None:
        """Why it cannot go on, in one line."""
        ...

    def fitting(self, token_ids: list[int]) -> int:
        """How many of these, from the first on, the grammar allows to follow one another."""
        ...


class PenaltyHistory:
    """Distinct ids of prompt and output in order of appearance after the prompt's sorted ones.

    `counts` says how often the id occurs in the output (0: prompt only). Kept token by token, so that packing
    a step never walks a context.
    """

    __slots__ = ("_counts", "_ids", "_index", "_prompt_size", "_size")

    def __init__(self, prompt_ids: npt.NDArray[np.int32]) -> None:
        self._ids = np.unique(prompt_ids).astype(np.int32)
        self._size = self._prompt_size = len(self._ids)
        self._counts = np.zeros(self._size, np.int32)
        self._index = {token: i for i, token in enumerate(self._ids.tolist())}

    def add(self, token_id: int) -> None:
        """Count one output token."""
        at = self._index.setdefault(token_id, self._size)
        if at == self._size:
            self._ids = _room(self._ids, at + 1)
            self._counts = _room(self._counts, at + 1)
            self._ids[at], self._counts[at] = token_id, 0
            self._size += 1
        self._counts[at] += 1

    def view(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """(ids, counts), both [distinct ids], valid until the next `add`."""
        return self._ids[: self._size], self._counts[: self._size]

    def views(self, drafts: list[int]) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]]:
        """What `view` says now and would say after each of `drafts`, one after the other; none is kept."""
        seen = [(self._ids[: self._size], self._counts[: self._size].copy())]
        for token in drafts:
            self.add(token)
            seen.append((self._ids[: self._size], self._counts[: self._size].copy()))
        self.take_back(drafts)
        return seen

    def take_back(self, token_ids: list[int]) -> None:
        """Undo the latest calls of `add`, which were for these tokens in this order."""
        for token in reversed(token_ids):
            at = self._index[token]
            self._counts[at] -= 1
            if self._counts[at] == 0 and at >= self._prompt_size:
                del self._index[token]
                self._size -= 1


class Sequence:
    """The state of one request in the engine. Mutated by scheduler, prefix cache and loop only.

    tokens[:length] are prompt and output; the first `num_computed` of them are in the cache blocks
    block_ids[:num_blocks]. A sequence that waits holds no block and has computed nothing. For the time of a
    step `tokens` may go on with drafts, which count nowhere until they are drawn as well.
    """

    __slots__ = (
        "bias",
        "block_ids",
        "cached_tokens",
        "draft_rates",
        "guide",
        "history",
        "is_long",
        "keys",
        "last_token",
        "length",
        "num_blocks",
        "num_computed",
        "num_prompt",
        "num_published",
        "order",
        "packed",
        "preempted",
        "prompt_scores",
        "rank",
        "request",
        "scores_prompt",
        "tokens",
        "wait_key",
    )

    def __init__(self, request: Request, order: int) -> None:
        prompt = np.ascontiguousarray(request.prompt_ids, np.int32)
        self.request = request
        self.order = order  # arrival number
        self.rank = (request.priority, 0, order)  # smaller goes first; set anew by queue.py
        self.is_long = False  # in the lane of long prompts, owned by the scheduler
        self.tokens = prompt.copy()
        self.length = self.num_prompt = len(prompt)
        self.last_token = int(prompt[-1])
        self.block_ids = np.zeros(8, np.int32)
        self.num_blocks = 0
        self.num_computed = 0
        self.num_published = 0  # leading full blocks already offered to the prefix cache
        self.keys: list[bytes] = []  # chained keys of the leading full blocks, as far as needed yet
        self.wait_key: bytes | None = None  # block another sequence is computing for this one
        self.preempted = False  # lost its blocks at least once
        self.cached_tokens = 0  # prompt tokens not computed when first admitted
        self.draft_rates: list[float] | None = (
            None  # how often its drafts are right, owned by draft_policy.py
        )
        self.guide: Guide | None = None  # of a request with a grammar, as soon as that is compiled
        self.scores_prompt = request.prompt_logprobs is not None
        self.prompt_scores: list[TokenLogprobs] = []  # of prompt positions 1, 2, ...
        self.packed: tuple[bytes, bytes] | None = None  # sampling columns of this request, owned by batch.py
        self.bias: tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]] | None = None  # owned by stopping.py
        s = request.sampling
        penalised = s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0
        self.history = PenaltyHistory(prompt) if penalised else None

    @property
    def num_output(self) -> int:
        return self.length - self.num_prompt

    @property
    def max_stored(self) -> int:
        """Tokens it will have in the cache at most; the last one drawn is never computed."""
        return self.num_prompt + self.request.max_new_tokens - 1

    @property
    def reusable_tokens(self) -> int:
        """Leading tokens that need no computing if cached: never the last one, nor one still to be scored."""
        if not self.scores_prompt or len(self.prompt_scores) == self.num_prompt - 1:
            return self.length - 1
        return len(self.prompt_scores)

    def scored_positions(self, num_new: int) -> range:
        """Prompt positions among the next `num_new` tokens whose logits score the prompt token after them."""
        if not self.scores_prompt:
            return range(0)
        stop = min(self.num_computed + num_new, self.num_prompt - 1)
        return range(max(self.num_computed, len(self.prompt_scores)), stop)

    def num_draws(self, num_new: int) -> int:
        """Tokens drawn when the next `num_new` are computed: one behind the last, one behind each draft."""
        return max(self.num_computed + num_new - self.length + 1, 0)

    def put_drafts(self, token_ids: list[int]) -> None:
        """Write what may come next behind the last token."""
        end = self.length + len(token_ids)
        self.tokens = _room(self.tokens, end)
        self.tokens[self.length : end] = token_ids

    def append_token(self, token_id: int) -> None:
        """Take a drawn token."""
        if self.length == len(self.tokens):
            self.tokens = _room(self.tokens, self.length + 1)
        self.tokens[self.length] = token_id
        self.length += 1
        self.last_token = token_id
        if self.history is not None:
            self.history.add(token_id)

    def append_blocks(self, block_ids: list[int]) -> None:
        end = self.num_blocks + len(block_ids)
        self.block_ids = _room(self.block_ids, end)
        self.block_ids[self.num_blocks : end] = block_ids
        self.num_blocks = end

    def drop_blocks(self) -> list[int]:
        """Forget all blocks and what was computed into them; the blocks, for release."""
        blocks: list[int] = self.block_ids[: self.num_blocks].tolist()
        self.num_blocks = self.num_computed = self.num_published = 0
        return blocks


def _room(array: npt.NDArray[np.int32], size: int) -> npt.NDArray[np.int32]:
    """`array` itself, or a copy of twice the length, so that `size` entries fit."""
    if size <= len(array):
        return array
    grown = np.empty(max(size, 2 * len(array)), np.int32)
    grown[: len(array)] = array
    return grown
