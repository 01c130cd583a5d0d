"""What all routes share: the models that are served, each with names and engine, and the server's limits.

Knows no HTTP.
"""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lmdeploy import __version__
from lmdeploy.errors import ModelNotServedError
from lmdeploy.logging import REQUEST
from lmdeploy.models.hub import model_name
from lmdeploy.runtime.client import ProcessClient
from lmdeploy.runtime.generate import Frontend
from lmdeploy.runtime.memory_plan import MAX_BODIES
from lmdeploy.serve.binding import Watch
from lmdeploy.serve.kept_prompts import KeptPrompts
from lmdeploy.serve.keys import Keys
from lmdeploy.serve.parsers.select import Parsers
from lmdeploy.serve.record import RECORD, Record
from lmdeploy.serve.request_times import RequestTimes
from lmdeploy.serve.running import Running

logger = logging.getLogger("lmdeploy.serve")

# What this interface means where neither the request nor the model's generation_config says anything.
SAMPLING_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0.0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Limits and policies of one server; sizes in bytes, times in seconds."""

    api_keys: tuple[str, ...] = ()  # keys, hashes, and @FILE for those in a file; see `keys`
    allow_origins: tuple[str, ...] = ("*",)
    allow_methods: tuple[str, ...] = ("*",)
    allow_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    max_body: int = MAX_BODIES
    max_bodies: int = MAX_BODIES  # of all bodies that are being read or parsed; more are answered 429
    max_requests: int = 1024  # POST requests held at once; more are answered 429
    key_requests: int | None = None  # of one API key in a minute; None: any number
    key_tokens: int | None = None  # of its prompts and answers in a minute
    request_timeout: float | None = None  # that the answers of one request may take
    keep_alive: float = 15.0  # silence after which a stream gets a comment line
    docs: bool = True
    abort_handling: bool = False  # clients may end requests by name
    named_tool_finish: str = "stop"  # finish_reason of an answer that calls the tool that tool_choice names
    sleep_mode: bool = False  # clients may put models to sleep
    web_page: bool = True  # at /, for everybody
    metrics: bool = True


@dataclass(frozen=True, slots=True)
class Reply:
    """What an answer says of itself, the same in every chunk of a stream."""

    id: str
    created: int
    model: str
    fingerprint: str

    def head(self, kind: str) -> dict[str, object]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


class Report(Protocol):
    """Hears of every request that has ended."""

    def write(self, record: Record) -> None: ...

    def reopen(self) -> None:
        """Go on in a new file where the old one was moved away."""

    def close(self) -> None: ...


@dataclass(slots=True)
class Served:
    """One model behind one engine.

    log_len: characters of a prompt in the log; None: all. log_prompts: also into the access log.
    about: how its engine was made, for metrics. by_path: the path as typed and its last part are names too.
    """

    frontend: Frontend
    client: ProcessClient
    model: str  # as typed at the command line
    extra_names: tuple[str, ...] = ()
    log_len: int | None = None
    log_prompts: bool = False
    parsers: Parsers = field(default_factory=Parsers)  # of tool calls and reasoning in answers
    kept: KeptPrompts | None = None  # the last prompts, where the server keeps them
    about: Mapping[str, str] = field(default_factory=dict)
    by_path: bool = True
    created: int = field(default_factory=lambda: int(time.time()))
    times: RequestTimes = field(init=False)
    watch: Watch = field(init=False, default_factory=Watch)
    missing: frozenset[str] = frozenset()  # parts of a sleeping engine that nobody has asked back yet
    max_characters: int = field(init=False)  # of a prompt; no tokenizer could make a longer one fit

    def __post_init__(self) -> None:
        self.times = self.client.observer = RequestTimes(self.frontend.session_len)
        tokenizer = self.frontend.tokenizer
        # No token stands for more characters than it has bytes.
        longest = max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
        self.max_characters = self.frontend.session_len * max(longest, 1)
        # The first text with a control token in it makes the tokenizer build what it needs for all of them.
        tokenizer.encode(" ".join(tokenizer.decode([i], False) for i in tokenizer.special_ids))

    @property
    def ids(self) -> tuple[str, ...]:
        """Names that /v1/models lists; the first is the one that stands for "no model named"."""
        return tuple(dict.fromkeys((*self.extra_names, *([model_name(self.model)] if self.by_path else []))))

    @property
    def names(self) -> tuple[str, ...]:
        """Every name a request may use: the ids and the path as typed."""
        return tuple(dict.fromkeys((*self.ids, *([self.model] if self.by_path else []))))

    @property
    def fingerprint(self) -> str:
        text = f"{__version__} {self.model} {self.frontend.session_len}"
        return "fp_" + hashlib.sha256(text.encode()).hexdigest()[:10]

    def reply(self, prefix: str, model: str, name: str | None = None) -> Reply:
        """The identity of a new answer in the name of `model`; `name`: what the client calls it."""
        reply = Reply(f"{prefix}-{name or uuid.uuid4().hex}", int(time.time()), model, self.fingerprint)
        if (record := RECORD.get()) is not None:
            record.model, record.reply_id = model, reply.id
        return reply

    def log_prompt(self, reply_id: str, ids: Sequence[int]) -> None:
        """The prompt as the model sees it: at level REQUEST, into the access log, among the kept ones: each
        where that was asked for."""
        if self.kept is not None:
            self.kept.add(reply_id, self.ids[0], self.frontend.tokenizer, ids)
        if not (logger.isEnabledFor(REQUEST) or self.log_prompts):
            return
        text = self.frontend.tokenizer.decode(ids, skip_special_tokens=False)[: self.log_len]
        logger.log(REQUEST, "%s: %d tokens: %r", reply_id, len(ids), text)
        if self.log_prompts and (record := RECORD.get()) is not None:
            record.prompt = text


@dataclass(slots=True)
class Server:
    """All served models, and what is counted over all of them."""

    models: tuple[Served, ...]
    options: ServerOptions = field(default_factory=ServerOptions)
    draining: bool = False
    loading: bool = False  # not every model has been there yet
    active: int = 0  # POST requests that are being answered
    body_bytes: int = 0  # of bodies that are being read or parsed
    running: Running = field(default_factory=Running)
    keys: Keys = field(init=False)
    reports: tuple[Report, ...] = ()
    answers: Counter[tuple[str, str, int]] = field(default_factory=Counter)  # by method, route and status

    def __post_init__(self) -> None:
        self.keys = Keys(self.options.api_keys)

    def answered(self, record: Record) -> None:
        """A request has its answer, or its client has left."""
        self.answers[record.method, record.route, record.status] += 1
        for report in self.reports:
            report.write(record)

    def model(self, asked: str | None) -> tuple[Served, str]:
        """The model a request is for, and the name to answer with. Raises ModelNotServedError."""
        if asked is None:
            return self.models[0], self.models[0].ids[0]
        for served in self.models:
            if asked in served.names:
                return served, asked
        listed = ", ".join(f"`{name}`" for served in self.models for name in served.names)
        raise ModelNotServedError(
            f"The model `{asked[:200]}` does not exist; this server answers to {listed}.", param="model"
        )
