"""Bodies of the requests: fields, types, ranges, and which known fields are refused.

Owns what is valid by itself; what depends on the model (vocabulary, context length, template) is checked
later. An explicit null counts as absent everywhere. Unknown fields are accepted and logged once per name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    StrictBool,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from lmdeploy.config import GenerationConfig
from lmdeploy.engine.request import Grammar
from lmdeploy.errors import InvalidValueError, RequestError
from lmdeploy.serve.errors import from_validation
from lmdeploy.serve.openai.structured import GRAMMAR_FIELDS, asked_grammar

logger = logging.getLogger("lmdeploy.serve")

MAX_STOPS = 32
MAX_STOP_LENGTH = 1024
MAX_STOP_IDS = 4096
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_COUNT = 2**63 - 1


def _number(value: Any) -> Any:
    """JSON numbers only: neither true nor "1" is one. 1.0 is an integer."""
    if isinstance(value, bool | str):
        raise PydanticCustomError("number_type", "must be a number")
    return value


def _stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise PydanticCustomError("stops", "must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise PydanticCustomError("stops", "must hold at most {most} strings", {"most": MAX_STOPS})
    if not all(0 < len(s) <= MAX_STOP_LENGTH for s in stops):
        raise PydanticCustomError(
            "stops", "must hold strings of 1 to {most} characters", {"most": MAX_STOP_LENGTH}
        )
    return stops


# Comes after the ranges: pydantic writes those into the schema only if they stand right behind the type.
_NUMBER = BeforeValidator(_number)
Float = Annotated[float, Field(allow_inf_nan=False), _NUMBER]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT), _NUMBER]
TokenId = Annotated[int, Field(ge=0, lt=2**31), _NUMBER]
Ids = Annotated[list[TokenId], Field(min_length=1)]
SessionId = Annotated[int, Field(ge=-1, lt=2**63), _NUMBER]
Name = Annotated[str, Field(min_length=1, max_length=128, pattern="^[ -~]+$")]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS), _NUMBER]
Stops = Annotated[list[str], BeforeValidator(_stops, json_schema_input_type=str | list[str])]


B = TypeVar("B", bound="Body")


class StreamOptions(BaseModel):
    include_usage: StrictBool | None = None
    continuous_usage_stats: StrictBool | None = None


class Body(BaseModel):
    """What all bodies share. Names that are no fields are kept apart: some are refused, the others logged."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)

    model: str | None = None

    def names(self) -> tuple[tuple[str, str | int], ...]:
        """What the client calls this request; session -1 is none."""
        given = {name: getattr(self, name, None) for name in ("request_id", "session_id")}
        return tuple((name, value) for name, value in given.items() if value not in (None, -1))

    def check(self) -> None:
        """What concerns several fields. Raises RequestError."""


class GenerationBody(Body):
    """Fields of all routes that generate."""

    request_id: Name | None = None
    session_id: SessionId | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False), _NUMBER] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), _NUMBER] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31), _NUMBER] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), _NUMBER] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False), _NUMBER] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False), _NUMBER] | None = None
    # Beyond this, products with it leave the range of the numbers the engine computes with.
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False), _NUMBER] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), _NUMBER] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), _NUMBER] | None = None
    stop: Stops | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: StrictBool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT), _NUMBER] | None = Field(
        None, validation_alias=AliasChoices("min_tokens", "min_new_tokens")
    )
    logit_bias: dict[str, Float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: Ids | None = None
    repetition_ngram_size: Annotated[int, Field(ge=0, le=1024), _NUMBER] | None = None
    repetition_ngram_threshold: Annotated[int, Field(ge=0, le=1024), _NUMBER] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), _NUMBER] | None = None
    spaces_between_special_tokens: StrictBool | None = None  # matters to tokenizers of another kind only
    detokenize: StrictBool | None = None  # text is always made
    skip_special_tokens: StrictBool | None = None
    include_stop_str_in_output: StrictBool | None = None
    truncate_prompt_tokens: Count | None = None
    cache_salt: str | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31), _NUMBER] | None = None  # smaller ones go first
    return_token_ids: StrictBool | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: StrictBool | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None
    _grammar: Grammar | None = PrivateAttr(None)

    @property
    def grammar(self) -> Grammar | None:
        """What the answer must be a text of."""
        return self._grammar

    def read_grammar(self) -> None:
        """Find `grammar` in its fields. Raises RequestError."""
        self._grammar = asked_grammar({name: getattr(self, name) for name in GRAMMAR_FIELDS})

    @property
    def choices(self) -> int:
        return self.n or 1

    def generation_config(self, max_new_tokens: int | None, logprobs: int | None) -> GenerationConfig:
        """The same wishes in the project's own words; sampling is on unless the temperature is 0."""
        if self.min_tokens and max_new_tokens and self.min_tokens > max_new_tokens:
            raise InvalidValueError(
                f"'min_tokens' must be at most the {max_new_tokens} of max_tokens, got {self.min_tokens}.",
                param="min_tokens",
            )
        return GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=True,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=None if self.top_k is None else max(0, self.top_k),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self.token_bias(),
            random_seed=self.seed,
            min_new_tokens=self.min_tokens,
            ignore_eos=bool(self.ignore_eos),
            stop_words=self.stop or None,
            bad_words=self.bad_words or None,
            stop_token_ids=self.stop_token_ids or None,
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
            allowed_token_ids=self.allowed_token_ids,
            repetition_ngram_size=self.repetition_ngram_size or 0,
            repetition_ngram_threshold=self.repetition_ngram_threshold or 0,
            logprobs=logprobs,
        )

    def check_shared(self) -> None:
        """What concerns several fields, on every route. Raises RequestError."""
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidValueError(
                "'prompt_logprobs' cannot be used with 'stream'.", param="prompt_logprobs"
            )
        if bool(self.repetition_ngram_size) != bool(self.repetition_ngram_threshold):
            raise InvalidValueError(
                "'repetition_ngram_size' and 'repetition_ngram_threshold' work together: give both or none.",
                param="repetition_ngram_size",
            )

    def token_bias(self) -> dict[int, float] | None:
        """logit_bias by token id. Raises RequestError for keys that are no ids."""
        bias = {}
        for key, value in (self.logit_bias or {}).items():
            if not (key.isascii() and key.isdecimal() and len(key) <= 10):
                raise InvalidValueError(
                    f"Invalid value for 'logit_bias': {key[:40]!r} is not a token id.", param="logit_bias"
                )
            bias[int(key)] = min(max(value, -100.0), 100.0)
        return bias or None


# Texts of chats are checked with their paths by runtime.chat_input.
_MESSAGES = {
    "anyOf": [
        {"type": "array", "items": {"type": "object"}, "minItems": 1},
        {"type": "string", "minLength": 1},
    ]
}


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[Any, WithJsonSchema(_MESSAGES)]
    input_ids: Ids | None = None
    enable_thinking: StrictBool | None = None
    do_preprocess: StrictBool | None = None
    max_completion_tokens: Count | None = None
    logprobs: StrictBool | None = None
    top_logprobs: TopLogprobs | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    documents: list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: StrictBool | None = None
    separate_reasoning: StrictBool | None = None
    add_special_tokens: StrictBool | None = None

    def check(self) -> None:
        """What concerns several fields. Raises RequestError."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidValueError("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidValueError(
                "'continue_final_message' and 'add_generation_prompt' cannot both be true.",
                param="continue_final_message",
            )


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Any = None
    max_tokens: Annotated[int, Field(ge=0), _NUMBER] | None = None
    logprobs: TopLogprobs | None = None
    echo: StrictBool | None = None
    best_of: Annotated[int, Field(ge=1, le=20), _NUMBER] | None = None
    add_special_tokens: StrictBool | None = None

    def check(self) -> None:
        """What concerns several fields. Raises RequestError."""
        if self.max_tokens == 0 and not self.echo:
            raise InvalidValueError("'max_tokens' must be at least 1 without 'echo'.", param="max_tokens")
        if self.best_of is not None and self.best_of < self.choices:
            raise InvalidValueError(
                f"'best_of' must be at least 'n' ({self.choices}), got {self.best_of}.", param="best_of"
            )
        if self.best_of is not None and self.best_of > self.choices and self.stream:
            raise InvalidValueError("'best_of' cannot be used with 'stream'.", param="best_of")


# Names that would change the answer and cannot be served; their empty values are accepted.
_REFUSED = dict.fromkeys(
    (
        "functions",
        "function_call",
        "audio",
        "use_beam_search",
        "length_penalty",
        "logits_processors",
        "image_data",
        "return_routed_experts",
        "echo",  # on the chat route, as the next one
    ),
    "is not supported by this server",
) | {
    "chat_template": "may not be given per request; the server's --chat-template decides",
    "suffix": "needs a model that is trained to fill in the middle",
}
_EMPTY: tuple[Any, ...] = (None, False, "", 0, "none", [], {})
_logged: set[str] = set()
_LOGGED_AT_MOST = 1000  # names; a client that invents names must not grow the set for ever


def _check_extras(extras: dict[str, Any]) -> None:
    for name, value in extras.items():
        if name in _REFUSED and value not in _EMPTY:
            raise RequestError(f"'{name}' {_REFUSED[name]}.", param=name)
        if name == "modalities" and value not in (None, ["text"]):
            raise RequestError("'modalities' can only be [\"text\"].", param="modalities")
        if name not in _logged and name not in _REFUSED and len(_logged) < _LOGGED_AT_MOST:
            _logged.add(name)
            logger.info("field %r is ignored", name[:100])


def parse_body(kind: type[B], raw: bytes | bytearray | Mapping[str, Any]) -> B:
    """The request in `raw` (JSON, or its fields), valid by itself. Raises RequestError."""
    try:
        body = kind.model_validate(raw) if isinstance(raw, Mapping) else kind.model_validate_json(raw)
    except ValidationError as error:
        raise from_validation(error, kind) from None
    _check_extras(body.model_extra or {})
    if isinstance(body, GenerationBody):
        body.read_grammar()
        body.check_shared()
    body.check()
    return body
