"""One conversation in a terminal: history, answers piece by piece, and what they cost in time.

Owns what is sent to the model in each turn and what is measured. Knows neither keyboard nor screen.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from lmdeploy.config import GenerationConfig
from lmdeploy.errors import RequestError, check_text
from lmdeploy.messages import Response
from lmdeploy.pipeline import Pipeline, Session


@dataclass(frozen=True, slots=True)
class Timing:
    """One answer in seconds and tokens. E2E = TTFT + TPOT x (tokens - 1)."""

    ttft: float
    e2e: float
    prompt_tokens: int
    cached_tokens: int
    tokens: int

    @property
    def tpot(self) -> float:
        """Seconds per token after the first."""
        return (self.e2e - self.ttft) / max(1, self.tokens - 1)

    def line(self) -> str:
        """For people: milliseconds, and tokens per second over the whole answer."""
        return (
            f"TTFT {1e3 * self.ttft:.1f} ms, TPOT {1e3 * self.tpot:.2f} ms, "
            f"{self.tokens / self.e2e:.1f} tokens/s: {self.tokens} tokens in {self.e2e:.2f} s "
            f"(prompt {self.prompt_tokens} tokens, {self.cached_tokens} of them cached)"
        )


class Conversation:
    """Turns of one user with one model; the whole history is sent again in each."""

    def __init__(self, pipe: Pipeline, config: GenerationConfig, system: str | None = None) -> None:
        self.system = system
        self.turns: list[tuple[str, str]] = []
        self.timing: Timing | None = None  # of the newest answer
        self.last = Response()  # the newest answer
        self.dropped = 0  # turns given up for the newest answer
        self._pipe = pipe
        self._config = config
        self._session: Session | None = None

    def clear(self) -> None:
        """Forget all turns; the system text stays."""
        self.turns.clear()

    def stop(self) -> None:
        """End the running answer early. May be called from a signal handler."""
        if self._session is not None:
            self._session.abort()

    def check(self, prompt: str) -> None:
        """Raise the RequestError that `answer` would begin with."""
        sent, frontend = self._fit(prompt), self._pipe.frontend
        ids = frontend.prompt_ids(sent) if isinstance(sent, str) else frontend.chat_ids(sent)
        frontend.request("check", ids, self._config, param="messages")

    def remark(self) -> str:
        """What the user should know about how the newest answer came about; mostly nothing."""
        frontend, remarks = self._pipe.frontend, []
        if self.dropped:
            remarks.append(
                f"oldest turns dropped: {self.dropped}; the conversation no longer fits into "
                f"{frontend.session_len} tokens, which --session-len sets"
            )
        if self.last.finish_reason == "length":
            limit = self._config.max_new_tokens
            full = self.last.input_token_len + self.last.generate_token_len >= frontend.session_len
            by = (
                f"the context of {frontend.session_len} tokens is full"
                if full
                else f"--max-new-tokens {limit}"
            )
            remarks.append(f"the answer was cut: {by}")
        if self.last.finish_reason == "abort":
            remarks.append("stopped")
        return "\n".join(f"({remark})" for remark in remarks)

    def stats(self) -> str:
        """Time of the newest answer, turns, and the cache."""
        now = self._pipe.stats()
        lines = [self.timing.line()] if self.timing is not None else []
        lines.append(f"turns in the conversation: {len(self.turns)}")
        lines.append(
            f"cache: {now.blocks_total} blocks, {now.blocks_cached} of them reusable, {now.blocks_free} "
            f"free; {now.totals.cached_tokens} of {now.totals.prompt_tokens} prompt tokens were found there"
        )
        if now.totals.drafted_tokens:
            right = f"{now.totals.accepted_tokens} of {now.totals.drafted_tokens} guessed tokens were right"
            lines.append(f"speculation: {right}; {now.totals.steps} steps in all")
        return "\n".join(lines)

    def answer(self, prompt: str) -> Iterator[str]:
        """Text of the answer as it comes; what came before a stop stays in the history.

        Oldest turns are dropped while the conversation leaves too little room. Raises RequestError, and then
        the prompt is not part of the history.
        """
        sent = self._fit(prompt)
        self.last, self._session = Response(), self._pipe.session()
        started = time.perf_counter()
        first = None
        try:
            for piece in self._pipe.stream_infer(sent, self._session, self._config):
                first = first or time.perf_counter()
                self.last.extend(piece)
                if piece.text:
                    yield piece.text
        finally:
            self._session = None
            if self.last.generate_token_len and first is not None:
                self._close_turn(prompt, first - started, time.perf_counter() - started)
        if self.last.finish_reason == "error":
            raise RequestError(self.last.error_message or "the engine failed")

    def _close_turn(self, prompt: str, ttft: float, e2e: float) -> None:
        last = self.last
        self.turns.append((prompt, last.text))
        self.timing = Timing(ttft, e2e, last.input_token_len, last.cached_tokens, last.generate_token_len)

    def _fit(self, prompt: str) -> str | list[dict[str, str]]:
        """What to send: the prompt with as many of the newest turns as leave room for an answer."""
        self.dropped = 0
        check_text(prompt, "the prompt")
        if not prompt.strip():
            raise RequestError("the prompt is empty: write a question")
        frontend = self._pipe.frontend
        if not frontend.chat_template.exists:
            return prompt
        room = min(self._config.max_new_tokens or frontend.session_len, frontend.session_len // 4)
        while self.turns and len(frontend.chat_ids(self._messages(prompt))) + room > frontend.session_len:
            del self.turns[0]
            self.dropped += 1
        return self._messages(prompt)

    def _messages(self, prompt: str) -> list[dict[str, str]]:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for asked, answer in self.turns:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        return [*messages, {"role": "user", "content": prompt}]
