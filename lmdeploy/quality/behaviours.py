"""Asks a model the questions through the product's own engine and scores what it answers.

Greedy answers are scored; a second round at temperature 0.7 with fixed seeds only looks for repetition loops.
Sampling is not cut (no top_k, top_p, penalties), whatever the model's own defaults are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmdeploy.config import EngineConfig, GenerationConfig
from lmdeploy.messages import Response
from lmdeploy.pipeline.api import Pipeline
from lmdeploy.pipeline.load import load
from lmdeploy.quality.items import Item
from lmdeploy.quality.loops import has_loop
from lmdeploy.quality.scoring import Score, score
from lmdeploy.runtime.resolve import RuntimeConfig, resolve

TEMPERATURE = 0.7
_SESSION = 2048  # tokens; the questions are short
_CACHE_SHARE = 0.25
Tell = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Answer:
    """To the last turn of an item, at temperature 0. earlier: answers to the turns before. unfinished: cut
    off at the item's max_tokens. loop, sampled_loop: at temperature 0 and 0.7; of any turn."""

    text: str
    earlier: tuple[str, ...]
    score: Score
    tokens: int
    unfinished: bool
    loop: bool
    sampled_loop: bool
    error: str = ""


def engine_plan(path: Path, model_length: int) -> RuntimeConfig:
    """How the product would run the model for these questions; raises what it raises."""
    wishes = EngineConfig(session_len=min(_SESSION, model_length), cache_max_entry_count=_CACHE_SHARE)
    return resolve(str(path), wishes)


def ask(config: RuntimeConfig, items: Sequence[Item], seed: int, tell: Tell) -> list[Answer]:
    """Answers to all items, in their order; an item that cannot be asked says why in `error`."""
    with load(config) as pipe:
        work = 2 * sum(len(item.turns) for item in items)
        greedy = _Rounds(pipe, items, None, seed, tell, 0, work).run()
        sampled = _Rounds(pipe, items, TEMPERATURE, seed, tell, work // 2, work).run()
    return [_answer(item, one, other) for item, one, other in zip(items, greedy, sampled, strict=True)]


class _Rounds:
    """All first turns at once, then all second turns, each after the model's own answers."""

    def __init__(
        self,
        pipe: Pipeline,
        items: Sequence[Item],
        temperature: float | None,
        seed: int,
        tell: Tell,
        done: int,
        work: int,
    ) -> None:
        self._pipe, self._items, self._temperature, self._seed = pipe, items, temperature, seed
        self._tell, self._done, self._work = tell, done, work

    def run(self) -> list[list[Response]]:
        """Of each item the responses to its turns."""
        found: list[list[Response]] = [[] for _ in self._items]
        for turn in range(max(len(item.turns) for item in self._items)):
            asked = [i for i, item in enumerate(self._items) if turn < len(item.turns)]
            prompts = [self._prompt(self._items[i], found[i]) for i in asked]
            configs = [self._config(i) for i in asked]
            whole = self._pipe.stream_infer(prompts, gen_config=configs, stream_response=False)
            responses: list[Response] = [Response()] * len(asked)
            for response in whole:
                responses[response.index] = response
                self._done += 1
                self._tell("answers", self._done, self._work)
            for i, response in zip(asked, responses, strict=True):
                found[i].append(response)
        return found

    def _prompt(self, item: Item, said: Sequence[Response]) -> Any:
        messages = [dict(message) for message in item.before]
        for text, response in zip(item.turns, said, strict=False):
            messages += [_message("user", text), _message("assistant", response.text)]
        messages.append(_message("user", item.turns[len(said)]))
        if self._pipe.frontend.chat_template.exists:
            return messages
        return "\n".join(message["content"] for message in messages) + "\n"

    def _config(self, index: int) -> GenerationConfig:
        return GenerationConfig(
            max_new_tokens=self._items[index].max_tokens,
            do_sample=self._temperature is not None,
            temperature=self._temperature or 0.0,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            repetition_penalty=1.0,
            random_seed=self._seed + index,
        )


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _answer(item: Item, greedy: Sequence[Response], sampled: Sequence[Response]) -> Answer:
    last = greedy[-1]
    errors = [r.error_message or "it failed" for r in (*greedy, *sampled) if r.finish_reason == "error"]
    return Answer(
        text=last.text,
        earlier=tuple(response.text for response in greedy[:-1]),
        score=Score(False, errors[0]) if errors else score(last.text, item.check),
        tokens=last.generate_token_len,
        unfinished=last.finish_reason == "length",
        loop=any(has_loop(response.token_ids) for response in greedy),
        sampled_loop=any(has_loop(response.token_ids) for response in sampled),
        error=errors[0] if errors else "",
    )


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """scored: items with rules, of them passed. same: answers equal to the original's, word for word."""

    items: int
    scored: int
    passed: int
    same: int


@dataclass(frozen=True, slots=True)
class BehaviourFigures:
    """Counts. json, code, chains: how many items asked for such, and how many answers were not valid (a
    broken chain has a wrong equation or a wrong end)."""

    groups: dict[str, GroupFigures]
    items: int
    json: int
    invalid_json: int
    code: int
    invalid_code: int
    chains: int
    broken_chains: int
    loops: int
    sampled_loops: int
    unfinished: int
    failed: int
    mean_tokens: float
    seconds: float


def figures(
    items: Sequence[Item], answers: Sequence[Answer], original: Sequence[Answer], seconds: float
) -> BehaviourFigures:
    """Of one model beside the original (which may be the same answers)."""
    json, invalid_json = _share([a.score.invalid_json for a in answers])
    code, invalid_code = _share([a.score.invalid_code for a in answers])
    chains, broken = _share([a.score.broken_chain for a in answers])
    groups = {}
    for group in dict.fromkeys(item.group for item in items):
        some = [i for i, item in enumerate(items) if item.group == group]
        scored = [answers[i].score.passed for i in some if answers[i].score.passed is not None]
        same = sum(answers[i].text == original[i].text and not answers[i].error for i in some)
        groups[group] = GroupFigures(len(some), len(scored), sum(map(bool, scored)), same)
    return BehaviourFigures(
        groups,
        len(items),
        json,
        invalid_json,
        code,
        invalid_code,
        chains,
        broken,
        sum(a.loop for a in answers),
        sum(a.sampled_loop for a in answers),
        sum(a.unfinished for a in answers),
        sum(bool(a.error) for a in answers),
        sum(a.tokens for a in answers) / len(answers),
        seconds,
    )


def _share(values: Sequence[bool | None]) -> tuple[int, int]:
    asked = [value for value in values if value is not None]
    return len(asked), sum(asked)
