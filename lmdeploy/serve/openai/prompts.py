"""Prompt ids of both routes: template, plain text, lists of ids; and prompts too long to be worth encoding.

Knows the fields that shape a prompt. Knows no answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from lmdeploy.errors import ContextLengthError
from lmdeploy.runtime.generate import Frontend
from lmdeploy.serve.openai.errors import InvalidValueError, shorten
from lmdeploy.serve.openai.protocol import ChatBody, CompletionBody
from lmdeploy.text.tokenizer import Tokenizer

_OWN_FIELDS = {"messages", "tools", "add_generation_prompt", "continue_final_message"}
MAX_PROMPTS = 2048  # in one request


def chat_prompt(frontend: Frontend, body: ChatBody, messages: Sequence[dict[str, Any]]) -> list[int]:
    """Ids of a conversation as the model's template writes it. Raises RequestError."""
    if not body.truncate_prompt_tokens:
        _check_size(frontend, sum(len(m["content"]) for m in messages), "messages")
    proceed = bool(body.continue_final_message)
    if proceed and messages[-1]["role"] != "assistant":
        raise InvalidValueError(
            "'continue_final_message' needs a last message of role assistant.", param="continue_final_message"
        )
    extra = dict(body.chat_template_kwargs or {})
    for name in _OWN_FIELDS & extra.keys():
        raise InvalidValueError(
            f"'chat_template_kwargs' may not hold {name!r}.", param=f"chat_template_kwargs.{name}"
        )
    if body.documents is not None:
        extra["documents"] = body.documents
    if body.reasoning_effort is not None:
        extra["reasoning_effort"] = body.reasoning_effort
        if body.reasoning_effort == "none":
            extra.setdefault("enable_thinking", False)
    ids = frontend.chat_ids(
        messages,
        add_generation_prompt=body.add_generation_prompt is not False and not proceed,
        continue_final_message=proceed,
        **extra,
    )
    return _tail(ids, body.truncate_prompt_tokens)


def completion_prompts(frontend: Frontend, body: CompletionBody) -> list[tuple[list[int], str | None]]:
    """(ids, text as given or None) of each prompt. Raises RequestError."""
    return [
        (_tail(_ids(frontend, body, prompt, path), body.truncate_prompt_tokens), _text(prompt))
        for prompt, path in _split(frontend, body.prompt)
    ]


def _text(prompt: Any) -> str | None:
    return prompt if isinstance(prompt, str) else None


def _split(frontend: Frontend, prompt: Any) -> list[tuple[Any, str]]:
    """Each prompt with its path."""
    if prompt is None:
        bos = frontend.tokenizer.bos_id
        if bos is None:
            raise InvalidValueError("'prompt' is missing, and this model has no begin token.", param="prompt")
        return [([bos], "prompt")]
    if isinstance(prompt, str):
        return [(prompt, "prompt")]
    if not isinstance(prompt, list):
        raise _wrong("prompt", prompt)
    if not prompt:
        raise InvalidValueError("'prompt' is an empty list.", param="prompt")
    if not isinstance(prompt[0], str | list):
        return [(prompt, "prompt")]
    if any(type(one) is not type(prompt[0]) for one in prompt):
        raise InvalidValueError("'prompt' mixes strings and lists of token ids.", param="prompt")
    if len(prompt) > MAX_PROMPTS:
        raise InvalidValueError(f"'prompt' holds more than {MAX_PROMPTS} prompts.", param="prompt")
    return [(one, f"prompt[{i}]") for i, one in enumerate(prompt)]


def _ids(frontend: Frontend, body: CompletionBody, prompt: Any, path: str) -> list[int]:
    if isinstance(prompt, str):
        if not body.truncate_prompt_tokens:
            _check_size(frontend, len(prompt), path)
        if body.add_special_tokens is False:
            return frontend.tokenizer.encode(prompt, parse_special=True)
        return frontend.prompt_ids(prompt)
    if not isinstance(prompt, list):
        raise _wrong(path, prompt)
    for i, token in enumerate(prompt):
        if type(token) is not int:
            raise InvalidValueError(
                f"Invalid value for '{path}[{i}]': must be a token id, got {shorten(token)}.",
                param=f"{path}[{i}]",
            )
    return prompt


def _wrong(path: str, prompt: Any) -> InvalidValueError:
    return InvalidValueError(
        f"Invalid value for '{path}': must be a string or token ids, got {shorten(prompt)}.", param=path
    )


def _tail(ids: list[int], keep: int | None) -> list[int]:
    return ids if keep is None else ids[-keep:]


def _check_size(frontend: Frontend, characters: int, param: str) -> None:
    """Refuse, without encoding it, a text that no tokenizer could make fit."""
    least = characters // _longest_token(frontend.tokenizer)
    if least > frontend.session_len:
        noun = "messages" if param.startswith("messages") else "prompt"
        raise ContextLengthError(
            f"This model's maximum context length is {frontend.session_len} tokens. However, your {noun} "
            f"resulted in at least {least} tokens. Please shorten it: the answer needs room as well.",
            param=param,
        )


@lru_cache(maxsize=4)
def _longest_token(tokenizer: Tokenizer) -> int:
    """Bytes of the longest token: no token stands for more characters than that."""
    return max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)) or 1
