"""LMDeploy's ChatTemplateConfig: a chat format given by the strings around each message, as Jinja.

Each message becomes BEGIN content END, with BEGIN and END by role: system, eosys; user, eoh; assistant, eoa
and separator; tool, eotool. Without a system message a conversation begins with meta_instruction, if given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmdeploy.errors import ConfigError
from lmdeploy.text.builtin_templates import BUILT_IN, OWN

_STRINGS = ("system", "eosys", "user", "eoh", "assistant", "eoa", "separator", "tool", "eotool")
_OTHERS = ("model_name", "meta_instruction", "capability", "stop_words")

_TEMPLATE = """
{%- macro text(content) -%}
  {%- if content is string -%}{{ content }}
  {%- else -%}
    {%- for part in content or [] if part.type == 'text' -%}{{ part.text }}{{ '\n' if not loop.last }}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- set begin = {'system': system, 'user': user, 'assistant': assistant, 'tool': tool} -%}
{%- set end = {'system': eosys, 'user': eoh, 'assistant': eoa + separator, 'tool': eotool} -%}
{%- set opened = namespace(by_system=false) -%}
{%- if meta_instruction and messages and messages[0].role != 'system' -%}
  {%- set opened.by_system = joined -%}
  {{ system + meta_instruction + eosys }}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role not in begin -%}{{ raise_exception('unknown role ' ~ message.role) }}{%- endif -%}
  {%- if not (opened.by_system and message.role == 'user') -%}{{ begin[message.role] }}{%- endif -%}
  {{ text(message.content) + end[message.role] }}
  {%- set opened.by_system = joined and message.role == 'system' -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ opening }}{%- endif -%}
"""


@dataclass(frozen=True, slots=True)
class FieldTemplate:
    """Jinja text, the variables it needs, and strings that end an answer."""

    text: str
    variables: Mapping[str, Any]
    stop_words: tuple[str, ...]


def is_field_text(text: str) -> bool:
    """Whether a text is a JSON object (Jinja text begins with a brace too, but is no JSON)."""
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def read_fields(given: str | Mapping[str, Any], source: str) -> dict[str, Any]:
    """The fields that are set. ConfigError names the one that is unknown, ill-typed or not supported."""
    fields: dict[str, Any] = json.loads(given) if isinstance(given, str) else dict(given)
    fields = {key: value for key, value in fields.items() if value is not None}
    if "model_path" in fields:
        raise ConfigError(f"{source}: model_path is not supported; give that model's template file instead.")
    for key in fields:
        if key not in (*_STRINGS, *_OTHERS):
            raise ConfigError(f"{source}: unknown field {key!r} (known: {', '.join((*_OTHERS, *_STRINGS))}).")
    for key in (*_STRINGS, "meta_instruction", "model_name"):
        if not isinstance(fields.get(key, ""), str):
            raise ConfigError(f"{source}: {key} must be a string.")
    if fields.get("capability", "chat") != "chat":
        raise ConfigError(
            f"{source}: capability {fields['capability']!r} is not supported (supported: chat)."
        )
    stop_words = fields.get("stop_words", [])
    if not isinstance(stop_words, list | tuple) or not all(isinstance(word, str) for word in stop_words):
        raise ConfigError(f"{source}: stop_words must be a list of strings.")
    return fields


def means_own(fields: Mapping[str, Any], source: str) -> bool:
    """Whether the fields ask for the template in the model's files. ConfigError when they also change it."""
    if fields.get("model_name") != OWN:
        return False
    if others := [key for key in fields if key not in ("model_name", "capability")]:
        raise ConfigError(
            f"{source}: model_name {OWN!r} is the model's own template, which {others[0]} cannot change."
        )
    return True


def template_from_fields(fields: Mapping[str, Any], source: str) -> FieldTemplate:
    """`fields` as `read_fields` gives them; those of a built-in format stand in for what they leave out."""
    name = fields.get("model_name")
    known = BUILT_IN.get(name) if name is not None else None
    if known is None and not any(key in fields for key in _STRINGS):
        names = ", ".join((OWN, *BUILT_IN))
        wrong = (
            f"model_name {name!r} is not built in" if name else f"gives only {', '.join(fields) or 'nothing'}"
        )
        raise ConfigError(
            f"{source}: {wrong} (built in: {names}): leave it out to use the model's own template, or give"
            " the strings of the format, or a Jinja file."
        )
    texts = {**(known.fields if known else {}), **fields}
    variables: dict[str, Any] = {key: texts.get(key, "") for key in (*_STRINGS, "meta_instruction")}
    variables["joined"] = known is not None and known.joined and "user" not in fields
    # The models write the blank before an answer themselves.
    exact = known is None or "assistant" in fields
    variables["opening"] = variables["assistant"] if exact else variables["assistant"].rstrip()
    stop_words = fields.get("stop_words", known.stop_words if known else ())
    return FieldTemplate(_TEMPLATE, variables, tuple(stop_words))
