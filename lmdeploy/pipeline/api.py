"""`Pipeline`: prompts in, responses out.

Owns the forms a prompt may take, the order of results and what becomes of a prompt that fails. Knows neither
tokens (`runtime.generate`) nor how the engine is driven (`runtime.local`).
"""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from lmdeploy.config import GenerationConfig
from lmdeploy.engine.loop import Engine
from lmdeploy.engine.request import Request, TokenLogprobs
from lmdeploy.engine.stats import StepStats
from lmdeploy.errors import RequestError, UserError, rebuild_error, shorten
from lmdeploy.messages import Response
from lmdeploy.pipeline.answers import Answer, follow
from lmdeploy.pipeline.progress import Progress
from lmdeploy.pipeline.session import Prompt, Session, as_messages
from lmdeploy.runtime.chat_input import check_template_kwargs, normalise_messages
from lmdeploy.runtime.generate import Choice, Frontend
from lmdeploy.runtime.local import LocalClient

GenConfigs = GenerationConfig | Sequence[GenerationConfig] | None


class Pipeline:
    """Answers prompts with one engine; made by `pipeline()`. May be used from several threads at once."""

    def __init__(self, engine: Engine, frontend: Frontend) -> None:
        self.frontend = frontend
        self._client = LocalClient(engine)
        self._ids = itertools.count()

    def infer(
        self,
        prompts: Prompt | Sequence[Prompt],
        gen_config: GenConfigs = None,
        do_preprocess: bool = True,
        adapter_name: str | None = None,
        use_tqdm: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Response | list[Response]:
        """Answer one prompt (a text or a list of messages) with a Response, a list of prompts with a list.

        A prompt that fails does so alone: its Response has finish_reason "error" and says why.
        `do_preprocess=False` takes a text as it is, without the chat template; `chat_template_kwargs` go to
        the template; `use_tqdm` shows progress on standard error.
        """
        answers, single = self._answers(
            prompts, gen_config, do_preprocess, adapter_name, chat_template_kwargs
        )
        whole = [Response(index=answer.index) for answer in answers]
        with Progress(len(answers), use_tqdm) as progress:
            for piece in follow(self._client, answers):
                whole[piece.index].extend(piece)
                progress.advance(piece.finish_reason is not None)
        return whole[0] if single else whole

    __call__ = infer

    def stream_infer(
        self,
        prompts: Prompt | Sequence[Prompt],
        sessions: Session | Sequence[Session] | None = None,
        gen_config: GenConfigs = None,
        do_preprocess: bool = True,
        adapter_name: str | None = None,
        stream_response: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Response]:
        """Pieces of all answers as they come; `index` is the prompt. Leaving the iterator stops the rest.

        With `stream_response=False` each answer comes whole when it is finished. `sessions`, one per prompt,
        are handles by which an answer can be aborted from elsewhere; their history is not used.
        """
        answers, _ = self._answers(
            prompts, gen_config, do_preprocess, adapter_name, chat_template_kwargs, streams=stream_response
        )
        handles = [sessions] if isinstance(sessions, Session) else sessions or []
        if not isinstance(handles, list | tuple) or not all(isinstance(x, Session) for x in handles):
            raise RequestError("sessions must be made by pipe.session(), one per prompt", param="sessions")
        if handles and len(handles) != len(answers):
            raise RequestError(f"{len(handles)} sessions for {len(answers)} prompts", param="sessions")
        return self._stream(answers, list(handles), stream_response)

    def _stream(
        self, answers: list[Answer], sessions: list[Session], pieces: bool
    ) -> Generator[Response, None, None]:
        whole = [Response(index=answer.index) for answer in answers]
        stream = follow(self._client, answers)
        begun: list[Session] = []
        try:
            for session, answer in zip(sessions, answers, strict=False):
                session.begin(answer.request_id, whole[answer.index])
                begun.append(session)
            for piece in stream:
                whole[piece.index].extend(piece)
                if pieces:
                    yield piece
                elif piece.finish_reason is not None:
                    yield whole[piece.index]
        finally:
            stream.close()
            for session in begun:
                session.end()

    def session(self) -> Session:
        """A new, empty conversation for `chat`."""
        return Session(self._client.cancel)

    def chat(
        self,
        prompt: Prompt,
        session: Session | None = None,
        gen_config: GenerationConfig | None = None,
        stream_response: bool = False,
        adapter_name: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Session | Iterator[Response]:
        """Answer `prompt` within its conversation: gives the session, or the pieces of the answer.

        What was generated before an abort stays in the history; a prompt that failed leaves no trace there,
        and `session.response` says why it failed.
        """
        session = self.session() if session is None else session
        if not isinstance(session, Session):
            raise RequestError("session must be made by pipe.session()", param="session")
        answers, _ = self._answers(
            [session.messages(prompt)],
            gen_config,
            True,
            adapter_name,
            chat_template_kwargs,
            streams=stream_response,
        )
        stream = self._turn(prompt, session, answers)
        if stream_response:
            return stream
        for _piece in stream:
            pass
        return session

    def _turn(self, prompt: Prompt, session: Session, answers: list[Answer]) -> Iterator[Response]:
        stream = self._stream(answers, [session], pieces=True)
        said = Response()
        try:
            for piece in stream:
                said.extend(piece)
                yield piece
        finally:
            stream.close()
            ended = said.finish_reason in ("stop", "length")
            if ended or (said.text and said.finish_reason != "error"):
                session.history.append((prompt, said.text))

    def get_ppl(self, input_ids: Sequence[int] | Sequence[Sequence[int]]) -> float | list[float]:
        """Mean negative log-likelihood (natural, not exponentiated) of an id sequence, or of each of several.

        The first id is context only, so a sequence needs at least two. Raises RequestError.
        """
        sequences, single = _id_lists(input_ids)
        requests = [self._scoring(ids) for ids in sequences]
        scores = self._score(requests)
        means = [-float(np.mean([x.logprob for x in scores[r.request_id]])) for r in requests]
        return means[0] if single else means

    def _scoring(self, ids: Sequence[int]) -> Request:
        if len(ids) < 2:
            raise RequestError(
                "input_ids needs at least two ids: the first is context only", param="input_ids"
            )
        return self.frontend.scoring(self._next_id(), ids, param="input_ids")

    def _score(self, requests: list[Request]) -> dict[str, tuple[TokenLogprobs, ...]]:
        scores: dict[str, tuple[TokenLogprobs, ...]] = {}
        running = {request.request_id for request in requests}
        try:
            for request in requests:
                self._client.add(request)
            while running:
                for event in self._client.events(running):
                    if event.error is not None:
                        raise rebuild_error(event.error_kind, event.error)
                    if event.prompt_logprobs:
                        scores[event.request_id] = event.prompt_logprobs
                    if event.finish_reason is not None:
                        running.discard(event.request_id)
        finally:
            self._client.abort(running)
        return scores

    def get_reward_score(self, *_: Any, **__: Any) -> NoReturn:
        """Reward models are not among the supported ones: always raises."""
        raise UserError(
            "get_reward_score needs a reward model, and none is supported; see the list of models"
        )

    def batch_infer(self, *_: Any, **__: Any) -> NoReturn:
        """Replaced by `infer`: always raises."""
        raise UserError("Pipeline.batch_infer was replaced: call the pipeline itself, pipe([prompt, ...])")

    def generate(self, *_: Any, **__: Any) -> NoReturn:
        """Replaced by `stream_infer`: always raises."""
        raise UserError("Pipeline.generate was replaced: iterate over pipe.stream_infer(prompt)")

    def stats(self) -> StepStats:
        """Gauges and totals of the engine."""
        return self._client.stats()

    def close(self) -> None:
        """Free the model; later calls raise EngineDeadError, but closing again does nothing."""
        self._client.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next_id(self) -> str:
        return f"pipeline-{next(self._ids)}"

    def _answers(
        self,
        prompts: Prompt | Sequence[Prompt],
        gen_config: GenConfigs,
        do_preprocess: bool,
        adapter_name: str | None,
        template: Mapping[str, Any] | None,
        streams: bool = False,
    ) -> tuple[list[Answer], bool]:
        if adapter_name is not None:
            raise RequestError(
                "adapter_name: LoRA adapters are not supported; merge it first", param="adapter_name"
            )
        items, single = _as_list(prompts)
        variables = check_template_kwargs(template)
        configs = _one_per_prompt(gen_config, len(items))
        answers = []
        for index, (prompt, config) in enumerate(zip(items, configs, strict=True)):
            request_id = self._next_id()
            made = self._make(request_id, prompt, config, do_preprocess, variables, streams)
            answers.append(Answer(index, request_id, made))
        return answers, single

    def _make(
        self,
        request_id: str,
        prompt: Any,
        config: GenerationConfig,
        do_preprocess: bool,
        template: Mapping[str, Any],
        streams: bool,
    ) -> tuple[Request, Choice] | UserError:
        try:
            _check_prompt(prompt)
            ids = self._prompt_ids(prompt, do_preprocess, template)
            param = "prompt" if isinstance(prompt, str) else "messages"
            request = self.frontend.request(request_id, ids, config, param=param, streams=streams)
            return request, Choice(self.frontend, config)
        except UserError as error:
            return error

    def _prompt_ids(self, prompt: Prompt, do_preprocess: bool, template: Mapping[str, Any]) -> list[int]:
        if isinstance(prompt, str) and not (do_preprocess and self.frontend.chat_template.exists):
            return self.frontend.prompt_ids(prompt)
        if not do_preprocess:
            raise RequestError(
                "do_preprocess=False takes texts; messages need the template", param="do_preprocess"
            )
        return self.frontend.chat_ids(normalise_messages(as_messages(prompt)), **template)


def _as_list(prompts: Any) -> tuple[list[Any], bool]:
    """The prompts of a call, and whether it is one that stands alone."""
    if isinstance(prompts, str | tuple):
        return [prompts], True
    if isinstance(prompts, Mapping):
        return [[prompts]], True
    if not isinstance(prompts, list):
        raise RequestError(
            "prompts must be a text, a list of messages, or a list of such prompts, not "
            f"{type(prompts).__name__}",
            param="prompts",
        )
    single = bool(prompts) and all(isinstance(x, Mapping) for x in prompts)
    return ([prompts], True) if single else (prompts, False)


def _check_prompt(prompt: Any) -> None:
    if isinstance(prompt, tuple):
        raise RequestError(
            "images in prompts are not supported: the models here read text only", param="prompts"
        )
    if not isinstance(prompt, str | list):
        raise RequestError(
            f"a prompt is a text or a list of messages, not {type(prompt).__name__}", param="prompts"
        )


def _id_lists(input_ids: Any) -> tuple[list[list[int]], bool]:
    """Checked id sequences, and whether it is one that stands alone."""
    given = _listed(input_ids)
    single = bool(given) and isinstance(given[0], numbers.Integral)
    return [_ids(x) for x in ([given] if single else given)], single


def _listed(value: Any) -> list[Any]:
    if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes):
        return list(value)
    raise RequestError(
        f"input_ids must be a list of token ids or a list of such lists, not {type(value).__name__}",
        param="input_ids",
    )


def _ids(value: Any) -> list[int]:
    ids = _listed(value)
    wrong = next((x for x in ids if isinstance(x, bool) or not isinstance(x, numbers.Integral)), None)
    if wrong is not None:
        raise RequestError(f"input_ids: {shorten(wrong)} is no token id", param="input_ids")
    return [int(x) for x in ids]


def _one_per_prompt(gen_config: GenConfigs, count: int) -> list[GenerationConfig]:
    if gen_config is None or isinstance(gen_config, GenerationConfig):
        return [gen_config or GenerationConfig()] * count
    configs: list[Any] = list(gen_config) if isinstance(gen_config, list | tuple) else [gen_config]
    if len(configs) != count or not all(isinstance(x, GenerationConfig) for x in configs):
        raise RequestError(
            f"gen_config must be one GenerationConfig or a list of one per prompt ({count}), got "
            f"{len(configs)} of type {', '.join(sorted({type(x).__name__ for x in configs}))}",
            param="gen_config",
        )
    return configs
