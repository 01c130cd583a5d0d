"""Messages -> the prompt a model was trained on, as text and as token ids.

Owns where a template is found and that text given by users never becomes a control token, while the
template's own control tokens do. Knows no family and no path name: a template comes from the model's files or
from the user.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmdeploy.errors import ConfigError, ModelError, RequestError, text_problem
from lmdeploy.models.files import is_there, locate, read_json, read_text
from lmdeploy.models.gguf import GGUFFile
from lmdeploy.text.builtin_templates import BUILT_IN, OWN
from lmdeploy.text.jinja_limits import TemplateFailure
from lmdeploy.text.jinja_sandbox import CompiledTemplate
from lmdeploy.text.template_fields import is_field_text, means_own, read_fields, template_from_fields
from lmdeploy.text.tokenizer import MARK_NUMBER, Tokenizer, make_marks

Message = Mapping[str, Any]
Override = str | Path | Mapping[str, Any]


class ChatTemplate:
    """Made by `load_chat_template`. Safe to use from several threads.

    templates, kept as `texts`: name -> Jinja source; "default" serves all but requests with tools where there
    is a "tool_use". variables: what the template sees besides the messages. stop_words: end an answer as the
    template's owner wishes. adds_bos: the template leaves the begin marker to the tokenizer.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        tokenizer: Tokenizer,
        source: str,
        *,
        variables: Mapping[str, Any] | None = None,
        stop_words: Sequence[str] = (),
        adds_bos: bool = False,
    ) -> None:
        for text in (*templates.values(), *(variables or {}).values(), *stop_words):
            if (problem := text_problem(str(text))) is not None:
                raise ModelError(f"{source}: the chat template is not valid text: {problem}.")
        self.source, self.stop_words = source, tuple(stop_words)
        self._tokenizer, self._adds_bos = tokenizer, adds_bos
        self._variables = {**tokenizer.named_tokens, **(variables or {})}
        self.texts = dict(templates)
        self.text = templates.get("default") or next(iter(templates.values()), None)
        self._templates = {name: _compile(text, source) for name, text in templates.items()}
        self._guard = _Guard(tokenizer) if tokenizer.special_pattern is not None else None

    @property
    def exists(self) -> bool:
        return bool(self._templates)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt as text. RequestError with the template's own words when it refuses the messages.

        continue_final_message: the prompt ends inside the last message, whose text the answer goes on with
        (then no generation prompt is added). kwargs: variables of this template, such as enable_thinking.
        """
        text = self._render(messages, tools, add_generation_prompt, continue_final_message, kwargs)
        return self._guard.restore(text) if self._guard else text

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """The prompt as ids: the template's control tokens as such, all text of the caller as plain text."""
        text = self._render(messages, tools, add_generation_prompt, continue_final_message, kwargs)
        if self._guard is None or not self._guard.found_in(text):
            return self._tokenizer.encode(text, self._adds_bos, parse_special=True)
        marked = self._guard.restore(self._guard.mark_special(text))
        return self._tokenizer.encode_marked(marked, self._adds_bos)

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        kwargs: Mapping[str, Any],
    ) -> str:
        template = self._choose(bool(tools))
        given = {"messages": list(messages), "tools": list(tools) if tools else None, **kwargs}
        if continue_final_message:
            given["messages"] = _with_end_mark(given["messages"])
        if self._guard:
            given = self._guard.protect(given)
        variables = {
            **self._variables,
            "documents": None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            **given,
        }
        try:
            text = template.render(variables)
        except TemplateFailure as error:
            raise RequestError(f"the chat template refused the messages: {error}", param="messages") from None
        return _cut_at_end_mark(text) if continue_final_message else text

    def _choose(self, has_tools: bool) -> CompiledTemplate:
        if not self._templates:
            raise RequestError(
                f"{self.source}: this model has no chat template, so messages cannot become a prompt; give"
                " one with --chat-template, or send plain text prompts.",
                param="messages",
            )
        if has_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        return self._templates.get("default") or next(iter(self._templates.values()))


class _Guard:
    """Keeps control tokens in the caller's text apart from the template's own ones."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        pattern = tokenizer.special_pattern
        assert pattern is not None
        self._pattern, self._special_marks = pattern, tokenizer.marks
        # A field may also end in the beginning of a control token that another field completes.
        self._heads = {text[:n] for text in self._special_marks for n in range(1, len(text))}
        self._longest_head = max(map(len, self._heads), default=0)
        self._marks = make_marks({*self._special_marks, *self._heads})
        self._plain = {mark: text for text, mark in self._marks.items()}
        secret = next(iter(self._plain))[:-MARK_NUMBER]
        self._written = re.compile(re.escape(secret) + "." * MARK_NUMBER)

    def protect(self, value: Any) -> Any:
        """A copy of `value` (strings, lists, objects) with marks in place of control tokens."""
        if isinstance(value, str):
            return self._hide(value)
        if isinstance(value, Mapping):
            return {self.protect(key): self.protect(item) for key, item in value.items()}
        return [self.protect(item) for item in value] if isinstance(value, list | tuple) else value

    def _hide(self, text: str) -> str:
        text = self._pattern.sub(lambda match: self._marks[match[0]], text)
        for length in range(min(self._longest_head, len(text)), 0, -1):
            if text[-length:] in self._heads:
                return text[:-length] + self._marks[text[-length:]]
        return text

    def found_in(self, text: str) -> bool:
        return self._written.search(text) is not None

    def mark_special(self, text: str) -> str:
        """The control tokens that the template itself wrote, as the tokenizer's marks."""
        return self._pattern.sub(lambda match: self._special_marks[match[0]], text)

    def restore(self, text: str) -> str:
        """The caller's text as it was given."""
        return self._written.sub(lambda match: self._plain.get(match[0], ""), text)


_END_MARK = next(iter(make_marks(["end"]).values()))


def _with_end_mark(messages: list[Any]) -> list[Any]:
    """The messages with a mark behind the last one's text; the blank shows whether the template trims."""
    last = messages[-1] if messages else {}
    content = last.get("content")
    if isinstance(content, str):
        content = content + _END_MARK + " "
    elif isinstance(content, list) and any("text" in part for part in content):
        at = max(i for i, part in enumerate(content) if "text" in part)
        content = [*content]
        content[at] = {**content[at], "text": content[at]["text"] + _END_MARK + " "}
    else:
        raise RequestError("continue_final_message needs a last message with text.", param="messages")
    return [*messages[:-1], {**last, "content": content}]


def _cut_at_end_mark(text: str) -> str:
    at = text.rfind(_END_MARK)
    if at < 0:
        raise RequestError(
            "the chat template drops the last message, so it cannot be continued.", param="messages"
        )
    trims = not text.startswith(_END_MARK + " ", at)
    return text[:at].rstrip() if trims else text[:at]


def _compile(text: str, source: str) -> CompiledTemplate:
    try:
        return CompiledTemplate(text)
    except TemplateFailure as error:
        raise ModelError(f"{source}: the chat template is not valid Jinja: {error}.") from None


def load_chat_template(
    path: str | Path, tokenizer: Tokenizer, override: Override | None = None
) -> ChatTemplate:
    """The template of the model at `path`.

    override: the name of a built-in format, a Jinja file or text, or LMDeploy's ChatTemplateConfig fields
    (JSON file, JSON text or mapping); ConfigError when it is none of these. Without any template the result
    refuses messages.
    """
    if override is None:
        return _own(path, tokenizer)
    source = "chat template"
    if isinstance(override, Path) or (isinstance(override, str) and os.path.isfile(override)):
        source = str(override)
        override = _read(Path(override))
    elif isinstance(override, str) and override in (OWN, *BUILT_IN):
        override = {"model_name": override}
    if not isinstance(override, Mapping) and not is_field_text(override):
        return _from_jinja(override, tokenizer, source)
    fields = read_fields(override, source)
    return _own(path, tokenizer) if means_own(fields, source) else _from_fields(fields, tokenizer, source)


def _own(path: str | Path, tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate(own_templates(path), tokenizer, str(locate(path).path))


def own_templates(path: str | Path) -> dict[str, str]:
    """Name -> text of the templates in a model's files; the usual one is "default"."""
    files = locate(path)
    return _gguf_templates(files.path) if files.format == "gguf" else _directory_templates(files.path)


def _gguf_templates(path: Path) -> dict[str, str]:
    file = GGUFFile(path)
    file.close()
    prefix, found = "tokenizer.chat_template", {}
    for key, value in file.metadata.items():
        if isinstance(value, str) and (key == prefix or key.startswith(prefix + ".")):
            found[key[len(prefix) + 1 :] or "default"] = value
    return found


def _directory_templates(directory: Path) -> dict[str, str]:
    """Sources in order: chat_template.jinja with additional_chat_templates/, tokenizer_config.json,
    chat_template.json."""
    found = {}
    if is_there(directory / "chat_template.jinja"):
        found["default"] = _read(directory / "chat_template.jinja")
    for extra in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        found[extra.stem] = _read(extra)
    for name in ("tokenizer_config.json", "chat_template.json"):
        if not found and is_there(directory / name):
            found = _named(read_json(directory / name).get("chat_template"), directory / name)
    return found


def _named(value: Any, source: Path) -> dict[str, str]:
    """A template is given as its text, or as a list of objects with name and template."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in value}
    except (TypeError, KeyError):
        raise ModelError(
            f"{source}: chat_template is neither a text nor a list of name and template."
        ) from None


def _read(path: Path) -> str:
    return read_text(path)


def _from_fields(fields: Mapping[str, Any], tokenizer: Tokenizer, source: str) -> ChatTemplate:
    made = template_from_fields(fields, source)
    try:
        return ChatTemplate(
            {"default": made.text},
            tokenizer,
            source,
            variables=made.variables,
            stop_words=made.stop_words,
            adds_bos=True,
        )
    except ModelError as error:
        raise ConfigError(error.message) from None


def _from_jinja(text: str, tokenizer: Tokenizer, source: str) -> ChatTemplate:
    if "{{" not in text and "{%" not in text:
        if len(text.split()) == 1 and (os.sep in text or text.endswith((".json", ".jinja"))):
            what = "is no regular file" if os.path.lexists(text) else "there is no such file"
            raise ConfigError(f"chat template file {text}: {what}.")
        raise ConfigError(
            f"chat template {text[:80]!r} is neither a built-in format ({', '.join((OWN, *BUILT_IN))}), nor a"
            " file, nor Jinja text, nor the JSON fields of a ChatTemplateConfig."
        )
    try:
        return ChatTemplate({"default": text}, tokenizer, source)
    except ModelError as error:
        raise ConfigError(error.message) from None
