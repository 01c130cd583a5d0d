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
{%- if meta_instruction and messages and messages[0].role != 'system' -%}
  {{ system + meta_instruction + eosys }}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role not in begin -%}{{ raise_exception('unknown role ' ~ message.role) }}{%- endif -%}
  {{ begin[message.role] + text(message.content) + end[message.role] }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ assistant }}{%- endif -%}
"""


@dataclass(frozen=True, slots=True)
class FieldTemplate:
    """Jinja text, the variables it needs, and strings that end an answer."""

    text: str
    variables: Mapping[str, str]
    stop_words: tuple[str, ...]


def is_field_text(text: str) -> bool:
    """Whether a text is a JSON object (Jinja text begins with a brace too, but is no JSON)."""
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def template_from_fields(given: str | Mapping[str, Any], source: str) -> FieldTemplate:
    """Raises ConfigError naming the field that is unknown, ill-typed or not supported."""
    fields: dict[str, Any] = json.loads(given) if isinstance(given, str) else dict(given)
    fields = {key: value for key, value in fields.items() if value is not None}
    if "model_path" in fields:
        raise ConfigError(f"{source}: model_path is not supported; give that model's template file instead.")
    for key in fields:
        if key not in (*_STRINGS, *_OTHERS):
            raise ConfigError(f"{source}: unknown field {key!r} (known: {', '.join((*_OTHERS, *_STRINGS))}).")
    for key in (*_STRINGS, "meta_instruction"):
        if not isinstance(fields.get(key, ""), str):
            raise ConfigError(f"{source}: {key} must be a string.")
    if fields.get("capability", "chat") != "chat":
        raise ConfigError(
            f"{source}: capability {fields['capability']!r} is not supported (supported: chat)."
        )
    if not any(key in fields for key in _STRINGS):
        raise ConfigError(
            f"{source}: gives no field but {', '.join(fields) or 'nothing'}; templates built in under a name"
            " are not supported: leave it out to use the model's own, or give its strings or a Jinja file."
        )
    stop_words = fields.get("stop_words", [])
    if not isinstance(stop_words, list | tuple) or not all(isinstance(word, str) for word in stop_words):
        raise ConfigError(f"{source}: stop_words must be a list of strings.")
    variables = {key: fields.get(key, "") for key in (*_STRINGS, "meta_instruction")}
    return FieldTemplate(_TEMPLATE, variables, tuple(stop_words))
