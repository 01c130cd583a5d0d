"""One record of a data set -> a document: plain text, or a conversation for the model's chat template.

Owns which fields are looked for. Knows no file format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Message = dict[str, str]
Document = str | list[Message]

TEXT_FIELDS = ("text", "content", "document", "article", "raw_content", "sentence", "body", "code", "prompt")
CONVERSATION_FIELDS = ("messages", "conversations", "conversation")
# question fields -> answer fields: a conversation of one turn
TURNS = (
    (("instruction", "input"), ("output", "response")),
    (("question",), ("answer", "response")),
    (("prompt",), ("completion", "response", "answer")),
)
FIELDS = tuple(dict.fromkeys((*TEXT_FIELDS, *CONVERSATION_FIELDS, *(f for q, a in TURNS for f in (*q, *a)))))
EXPECTED = "text, content, messages, conversations, question + answer, instruction + output or the like"
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
}


def document(record: Any) -> Document | None:
    """None when the record has none of the fields that are looked for, or nothing in them."""
    if isinstance(record, str):
        return clean(record) or None
    if isinstance(record, list):
        return _conversation(record)
    if not isinstance(record, Mapping):
        return None
    for field in CONVERSATION_FIELDS:
        found = _conversation(record.get(field))
        if found:
            return found
    found = _turn(record)
    if found:
        return found
    texts = (record.get(field) for field in TEXT_FIELDS)
    return next((clean(text) for text in texts if isinstance(text, str) and text.strip()), None)


def clean(text: str) -> str:
    """Half characters (escapes such as \\ud83d) joined where both halves are there, else replaced."""
    if not text.strip():
        return ""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _turn(record: Mapping[Any, Any]) -> list[Message] | None:
    for questions, answers in TURNS:
        asked = [clean(x) for x in (record.get(f) for f in questions) if isinstance(x, str) and x.strip()]
        replies = [clean(x) for x in (record.get(f) for f in answers) if isinstance(x, str) and x.strip()]
        if asked and replies:
            return [
                {"role": "user", "content": "\n\n".join(asked)},
                {"role": "assistant", "content": replies[0]},
            ]
    return None


def _conversation(value: Any) -> list[Message] | None:
    """Messages of role and content, or of from and value; None unless it is such a list."""
    if not isinstance(value, list | tuple) or not value:
        return None
    out: list[Message] = []
    for entry in value:
        if not isinstance(entry, Mapping):
            return None
        role, text = entry.get("role", entry.get("from")), _text(entry.get("content", entry.get("value")))
        if not isinstance(role, str) or text is None:
            return None
        out.append({"role": _ROLES.get(role.lower(), role), "content": clean(text)})
    return out if any(message["content"] for message in out) else None


def _text(content: Any) -> str | None:
    """A message's text; of a list of parts, that of its text parts."""
    if isinstance(content, list | tuple):
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        return "\n".join(part for part in parts if isinstance(part, str)) or None
    return content if isinstance(content, str) else None


def field_names(record: Any) -> tuple[str, ...]:
    """What a record has instead, for a message."""
    if isinstance(record, Mapping):
        return tuple(str(key) for key in record)
    return (f"(no fields: {type(record).__name__})",)
