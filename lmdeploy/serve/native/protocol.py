"""Bodies of the routes that are not OpenAI's: token routes, /generate, /get_ppl.

Owns what is valid by itself, as `openai.protocol` does for its routes, whose fields are used again here.
"""

from __future__ import annotations

from typing import Any

from pydantic import StrictBool

from lmdeploy.errors import InvalidValueError, MissingFieldError
from lmdeploy.serve.openai.protocol import Body, GenerationBody, Ids, Name, SessionId, TokenId

GENERATED = 128  # tokens that /generate makes where the request does not say, as LMDeploy does


class TokenizeBody(Body):
    """POST /tokenize: a prompt, or messages with what shapes their prompt."""

    prompt: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None
    add_special_tokens: StrictBool | None = None
    return_token_strs: StrictBool | None = None

    def check(self) -> None:
        """Raises RequestError."""
        _one_of(self, "prompt", "messages")


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: list[TokenId]


class EncodeBody(Body):
    """POST /v1/encode. do_preprocess: the input is a user's message, written by the chat template."""

    input: str | list[str]
    do_preprocess: StrictBool | None = None
    add_bos: StrictBool | None = None


class PerplexityBody(Body):
    """POST /get_ppl."""

    input: str | Ids


class AbortBody(Body):
    """POST /abort_request."""

    session_id: SessionId | None = None
    request_id: Name | None = None
    abort_all: StrictBool | None = None


class GenerateBody(GenerationBody):
    """POST /generate: a prompt as it is, or its ids; one answer."""

    prompt: str | None = None
    input_ids: Ids | None = None
    return_logprob: StrictBool | None = None

    def check(self) -> None:
        """Raises RequestError."""
        _one_of(self, "prompt", "input_ids")
        if self.choices != 1:
            raise InvalidValueError("'n' can only be 1 on this route.", param="n")


def _one_of(body: Body, first: str, second: str) -> None:
    if (getattr(body, first) is None) == (getattr(body, second) is None):
        raise MissingFieldError(f"Send either '{first}' or '{second}'.", param=first)
