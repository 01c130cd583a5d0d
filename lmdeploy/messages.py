"""What the offline API returns: `Response`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lmdeploy.engine.request import FinishReason


@dataclass(slots=True)
class Response:
    """An answer, or a piece of one while it is streamed.

    `token_ids` are the tokens of `text`; `logprobs` (parallel; one dictionary id -> natural log-probability,
    the token itself always in it) and `logits` (float32 [len(token_ids), vocab]) are there when they were
    asked for. `generate_token_len` counts every generated token, also one that ended the answer and is not
    printed. `error_code` and `error_message` say why when `finish_reason` is "error"; the other answers of
    the call are not affected. `last_hidden_state` and `routed_experts` are always None here.
    """

    text: str = ""
    generate_token_len: int = 0
    input_token_len: int = 0
    finish_reason: FinishReason | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None
    logits: npt.NDArray[np.float32] | None = None
    last_hidden_state: None = None
    index: int = 0  # place of the prompt in the call
    routed_experts: None = None
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    error_code: str | None = None
    error_message: str | None = None

    def extend(self, other: Response) -> Response:
        """Append the next piece of the same answer; returns self."""
        self.text += other.text
        self.token_ids += other.token_ids
        self.generate_token_len = other.generate_token_len
        self.input_token_len = other.input_token_len
        self.cached_tokens = max(self.cached_tokens, other.cached_tokens)
        self.finish_reason = other.finish_reason
        self.index = other.index
        self.error_code, self.error_message = other.error_code, other.error_message
        if other.logprobs is not None:
            self.logprobs = (self.logprobs or []) + other.logprobs
        if other.logits is not None:
            self.logits = other.logits if self.logits is None else np.concatenate((self.logits, other.logits))
        return self
