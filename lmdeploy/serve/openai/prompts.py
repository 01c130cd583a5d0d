"""Prompt ids of both routes: template, plain text, lists of ids; and prompts too long to be worth encoding.

Knows the fields that shape a prompt. Knows no answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from lmdeploy.errors import ContextLengthError, InvalidValueError, shorten
from lmdeploy.runtime.chat_input import check_template_kwargs, normalise_messages
from lmdeploy.runtime.generate import Frontend
from lmdeploy.serve.openai.protocol import ChatBody, CompletionBody, GenerationBody
from lmdeploy.serve.served import Served

_OWN_FIELDS = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
MAX_ANSWERS = 2048  # of one request, prompts times choices
MAX_CHARACTERS = 1 << 20  # that are encoded for a context they cannot fit; takes about 0.3 s


# Fields that shape what the template makes of messages, and say nothing to a prompt that is ready.
_TEMPLATE_FIELDS = (
    "tools",
    "documents",
    "chat_template_kwargs",
    "enable_thinking",
    "reasoning_effort",
    "continue_final_message",
)


def conversation(served: Served, body: ChatBody) -> tuple[list[int], str]:
    """Ids of a chat request, and the field they are from. Raises RequestError.

    That is messages as the model's template writes them; or, as LMDeploy has it, a text in their place or ids
    beside none, which are taken as they are.
    """
    if not isinstance(body.messages, str) and body.input_ids is None:
        if body.do_preprocess is False:
            raise InvalidValueError("'do_preprocess': false needs 'messages' as text.", param="do_preprocess")
        return chat_prompt(served, body, normalise_messages(body.messages)), "messages"
    param = "messages" if body.input_ids is None else "input_ids"
    if param == "input_ids" and body.messages:
        raise InvalidValueError("'input_ids' needs empty 'messages'.", param=param)
    for name in _TEMPLATE_FIELDS:
        if getattr(body, name):
            raise InvalidValueError(f"'{name}' needs 'messages' as a list of messages.", param=name)
    ids = body.input_ids
    if ids is None:
        cut = body.truncate_prompt_tokens is not None
        ids = plain_prompt(served, body.messages, param, body.add_special_tokens is not False, cut)
    return shorten_prompt(ids, body.truncate_prompt_tokens), param


def chat_prompt(served: Served, body: ChatBody, messages: Sequence[dict[str, Any]]) -> list[int]:
    """Ids of a conversation as the model's template writes it. Raises RequestError."""
    if not body.truncate_prompt_tokens:
        _check_size(served, sum(len(m["content"]) for m in messages), "messages")
    proceed = bool(body.continue_final_message)
    if proceed and messages[-1]["role"] != "assistant":
        raise InvalidValueError(
            "'continue_final_message' needs a last message of role assistant.", param="continue_final_message"
        )
    extra = check_template_kwargs(body.chat_template_kwargs, _OWN_FIELDS)
    if body.documents is not None:
        extra["documents"] = body.documents
    if body.reasoning_effort is not None:
        extra["reasoning_effort"] = body.reasoning_effort
        if body.reasoning_effort == "none":
            extra.setdefault("enable_thinking", False)
    if body.enable_thinking is not None:
        extra["enable_thinking"] = body.enable_thinking
    ids = served.frontend.chat_ids(
        messages,
        add_generation_prompt=body.add_generation_prompt is not False and not proceed,
        continue_final_message=proceed,
        **extra,
    )
    bos = served.frontend.tokenizer.bos_id
    if body.add_special_tokens and bos is not None and ids[:1] != [bos]:
        ids = [bos, *ids]
    return shorten_prompt(ids, body.truncate_prompt_tokens)


class Prompt(NamedTuple):
    """One of a request's prompts: its ids, its text where one was given, and its path in the body."""

    ids: list[int]
    text: str | None
    path: str


def completion_prompts(served: Served, body: CompletionBody) -> list[Prompt]:
    """All prompts of a request. Raises RequestError."""
    prompts = _split(served.frontend, body.prompt)
    count = len(prompts) * (body.best_of or body.choices)
    if count > MAX_ANSWERS:
        raise InvalidValueError(
            f"This request asks for {count} answers; the most is {MAX_ANSWERS}.", param="prompt"
        )
    return [
        Prompt(
            shorten_prompt(_ids(served, body, prompt, path), body.truncate_prompt_tokens), _text(prompt), path
        )
        for prompt, path in prompts
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
    return [(one, f"prompt[{i}]") for i, one in enumerate(prompt)]


def _ids(served: Served, body: CompletionBody, prompt: Any, path: str) -> list[int]:
    if isinstance(prompt, str):
        special = body.add_special_tokens is not False
        return plain_prompt(served, prompt, path, special, cut=body.truncate_prompt_tokens is not None)
    if not isinstance(prompt, list):
        raise _wrong(path, prompt)
    for i, token in enumerate(prompt):
        if type(token) is not int:
            raise InvalidValueError(
                f"Invalid value for '{path}[{i}]': must be a token id, got {shorten(token)}.",
                param=f"{path}[{i}]",
            )
    return prompt


def plain_prompt(served: Served, text: str, param: str, special: bool = True, cut: bool = False) -> list[int]:
    """Ids of a text, with the tokenizer's own markers unless not `special`. Raises RequestError.

    cut: the ids will be shortened, so that the text may be longer than the context.
    """
    if cut:
        check_length(served, text, param)
    else:
        _check_size(served, len(text), param)
    return served.frontend.tokenizer.encode(text, add_special_tokens=special, parse_special=True)


def check_length(served: Served, text: str, param: str) -> None:
    """Refuse a text that takes long to encode, whatever becomes of its ids. Raises InvalidValueError."""
    most = max(MAX_CHARACTERS, served.max_characters)
    if len(text) > most:
        raise InvalidValueError(
            f"'{param}' has {len(text)} characters; the most that is tokenised at once is {most}.",
            param=param,
        )


def _wrong(path: str, prompt: Any) -> InvalidValueError:
    return InvalidValueError(
        f"Invalid value for '{path}': must be a string or token ids, got {shorten(prompt)}.", param=path
    )


def check_cut(served: Served, body: GenerationBody) -> None:
    """Raise InvalidValueError for a shortened prompt that would still be longer than the context."""
    limit = served.frontend.session_len
    if (body.truncate_prompt_tokens or 0) > limit:
        raise InvalidValueError(
            f"'truncate_prompt_tokens' must be at most the context of {limit} tokens, got "
            f"{body.truncate_prompt_tokens}.",
            param="truncate_prompt_tokens",
        )


def shorten_prompt(ids: list[int], keep: int | None) -> list[int]:
    """The last `keep` ids, where a client asked for that."""
    return ids if keep is None else ids[-keep:]


def _check_size(served: Served, characters: int, param: str) -> None:
    """Refuse, without encoding it, a text that no tokenizer could make fit."""
    if characters > served.max_characters:
        limit = served.frontend.session_len
        noun = "messages" if param.startswith("messages") else "prompt"
        least = characters * limit // served.max_characters
        raise ContextLengthError(
            f"This model's maximum context length is {limit} tokens. However, your {noun} resulted in at "
            f"least {least} tokens. Please shorten it: the answer needs room as well.",
            param=param,
        )
