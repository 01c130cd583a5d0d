"""The last prompts of a server, for people who want to see what the model saw.

Knows no route. Texts of users are kept here, so a server has none of these unless it was asked to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lmdeploy.serve.record import RECORD
from lmdeploy.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class KeptPrompt:
    """One prompt. reply_id: of the answer; request_id: the x-request-id of the request."""

    reply_id: str
    request_id: str
    model: str
    tokenizer: Tokenizer
    ids: npt.NDArray[np.int32]


@dataclass(slots=True)
class KeptPrompts:
    """At most `most` prompts; the oldest is forgotten first."""

    most: int
    _prompts: deque[KeptPrompt] = field(init=False)

    def __post_init__(self) -> None:
        self._prompts = deque(maxlen=self.most)

    def add(self, reply_id: str, model: str, tokenizer: Tokenizer, ids: Sequence[int]) -> None:
        record = RECORD.get()
        request_id = record.request_id if record is not None else ""
        self._prompts.append(
            KeptPrompt(reply_id, request_id, model, tokenizer, np.asarray(ids, dtype=np.int32))
        )

    def find(self, name: str) -> list[KeptPrompt]:
        """The prompts of a request, named by the id of its answer or its x-request-id, in order."""
        return [kept for kept in list(self._prompts) if name in (kept.reply_id, kept.request_id)]
