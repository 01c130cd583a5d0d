"""Where `lmdeploy prompt` gets prompts from: a model's own files, a server, transformers.

Knows nothing of how they are shown.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from lmdeploy.errors import ConfigError, LMDeployError, shorten
from lmdeploy.models.files import locate
from lmdeploy.models.hub import resolve_model_path
from lmdeploy.runtime.chat_input import check_template_kwargs, normalise_messages
from lmdeploy.runtime.prompt_view import Token, tokens
from lmdeploy.serve.openai.tools import tool_use
from lmdeploy.serve.parsers.select import AUTO, choose
from lmdeploy.text.chat_template import load_chat_template
from lmdeploy.text.tokenizer import Tokenizer, load_tokenizer

_SECONDS = 60.0  # that a server may take


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is to become a prompt: messages with tools, or a plain text."""

    messages: Any
    tools: Any
    text: str | None
    add_generation_prompt: bool
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One side. tokens: None where only the text is known."""

    source: str
    text: str
    tokens: list[Token] | None

    def fields(self) -> dict[str, Any]:
        """For JSON."""
        listed = None if self.tokens is None else [token.fields() for token in self.tokens]
        return {"source": self.source, "text": self.text, "tokens": listed}


def own(model: str, talk: Conversation, chat_template: str | None = None) -> Prompt:
    """The prompt that the server would make. Raises ModelError, ConfigError and RequestError."""
    path = resolve_model_path(model)
    tokenizer = load_tokenizer(path)
    if talk.text is not None:
        return _prompt(model, tokenizer, tokenizer.encode(talk.text, True, parse_special=True))
    template = load_chat_template(path, tokenizer, chat_template)
    kwargs = check_template_kwargs(talk.kwargs, ("messages", "tools", "add_generation_prompt"))
    parsers = choose(AUTO, AUTO, template.texts)
    messages, tools = parsers.fit(normalise_messages(talk.messages), tool_use(talk.tools, None).shown)
    ids = template.encode(messages, tools, talk.add_generation_prompt, **kwargs)
    return _prompt(model, tokenizer, ids)


def _prompt(source: str, tokenizer: Tokenizer, ids: Sequence[int]) -> Prompt:
    return Prompt(source, tokenizer.decode(ids, skip_special_tokens=False), tokens(tokenizer, ids))


def against(what: str, model: str, talk: Conversation, api_key: str | None) -> Prompt:
    """The prompt of the other side. Raises ConfigError, ModelError and RequestError."""
    if what.startswith(("http://", "https://")):
        return _server(what, model, talk, api_key)
    if what == "transformers":
        return _transformers(model, talk)
    return own(what, talk)


def _transformers(model: str, talk: Conversation) -> Prompt:
    try:
        library = importlib.import_module("transformers")
    except ImportError:
        raise ConfigError("--against transformers needs that package: pip install transformers") from None
    path = resolve_model_path(model)
    files = locate(path)
    folder, more = (
        (files.path.parent, {"gguf_file": files.path.name}) if files.format == "gguf" else (path, {})
    )
    try:
        theirs = library.AutoTokenizer.from_pretrained(folder, **more)
        ids = _transformers_ids(theirs, talk)
    except Exception as error:  # the edge to a library that raises whatever it likes
        raise ConfigError(f"transformers fails: {type(error).__name__}: {shorten(str(error))}") from None
    return _prompt(f"transformers {library.__version__}", load_tokenizer(path), ids)


def _transformers_ids(theirs: Any, talk: Conversation) -> list[int]:
    if talk.text is not None:
        return list(theirs(talk.text)["input_ids"])
    text = theirs.apply_chat_template(
        normalise_messages(talk.messages),
        tools=tool_use(talk.tools, None).shown,
        add_generation_prompt=talk.add_generation_prompt,
        tokenize=False,
        **talk.kwargs,
    )
    return list(theirs(text, add_special_tokens=False)["input_ids"])


def _server(url: str, model: str, talk: Conversation, api_key: str | None) -> Prompt:
    """By POST /tokenize; from servers that cannot do that with messages, the text of /apply-template."""
    base = url.rstrip("/").removesuffix("/v1")
    tokenizer = load_tokenizer(resolve_model_path(model))
    body: dict[str, Any] = {"prompt": talk.text}
    if talk.text is None:
        body = {"messages": talk.messages, "add_generation_prompt": talk.add_generation_prompt}
        body |= {"tools": talk.tools} if talk.tools else {}
        body |= {"chat_template_kwargs": dict(talk.kwargs)} if talk.kwargs else {}
    answer = _post(f"{base}/tokenize", body, api_key)
    if isinstance(answer.get("count"), int) and isinstance(answer.get("tokens"), list):
        return _prompt(f"{base}/tokenize", tokenizer, answer["tokens"])
    if talk.text is not None:
        return _prompt(
            f"{base}/tokenize",
            tokenizer,
            _post(f"{base}/tokenize", {"content": talk.text}, api_key)["tokens"],
        )
    text = _post(f"{base}/apply-template", body, api_key).get("prompt")
    if not isinstance(text, str):
        raise ConfigError(f"{base} answers neither /tokenize with messages nor /apply-template")
    return Prompt(f"{base}/apply-template", text, None)


def _post(url: str, body: Mapping[str, Any], api_key: str | None) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"} | (
        {"Authorization": f"Bearer {api_key}"} if api_key else {}
    )
    try:
        with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=_SECONDS) as response:
            answer = json.load(response)
    except HTTPError as error:
        raise _Unreachable(f"{url} answers {error.code}: {shorten(_words(error))}") from None
    except (URLError, HTTPException, OSError, ValueError) as error:
        raise _Unreachable(f"{url} does not answer: {getattr(error, 'reason', None) or error}") from None
    if not isinstance(answer, dict):
        raise _Unreachable(f"{url} answers something else than a JSON object: {shorten(answer)}")
    return answer


class _Unreachable(LMDeployError):
    """The other side gives no prompt."""


def _words(error: HTTPError) -> str:
    """The message of an error body, or what there is of one."""
    text = error.read(1 << 16).decode("utf-8", "replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text
