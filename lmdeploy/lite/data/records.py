"""One record of a data set -> a document: plain text, or a conversation for the model's chat template.

Owns which fields are looked for. Knows no file format.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from lmdeploy.errors import shorten

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
    "developer": "developer",
    "tool": "tool",
    "function": "tool",
    "ipython": "ipython",
    "observation": "observation",
}


def document(record: Any, told: Counter[str] | None = None) -> Document | None:
    """None when the record has none of the fields that are looked for, or nothing in them.

    told: is counted up, by what there is to say, for what is left out of a conversation, and for one that
    cannot be used though it is there.
    """
    told = Counter() if told is None else told
    if isinstance(record, str):
        return clean(record) or None
    if isinstance(record, list):
        return _conversation(record, told)
    if not isinstance(record, Mapping):
        return None
    for field in CONVERSATION_FIELDS:
        found = _conversation(record.get(field), told)
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


def _conversation(value: Any, told: Counter[str]) -> list[Message] | None:
    """Messages of role and content, or of from and value; None unless it is such a list."""
    if not isinstance(value, list | tuple) or not value:
        return None
    out: list[Message] = []
    lost: Counter[str] = Counter()
    for entry in value:
        if not isinstance(entry, Mapping):
            return None
        role = entry.get("role", entry.get("from"))
        if not isinstance(role, str):
            return None
        if role.lower() not in _ROLES:
            told[f"conversations with an unknown role ({shorten(role)}) were skipped"] += 1
            return None
        text, others = _text(entry.get("content", entry.get("value")))
        if text is None:
            told[f"conversations with a message without text{_named(others)} were skipped"] += 1
            return None
        if others:
            lost[f"messages lost what is no text{_named(others)}"] += 1
        out.append({"role": _ROLES[role.lower()], "content": clean(text)})
    if not any(message["content"] for message in out):
        return None
    told.update(lost)
    return out


def is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and not {"role", "from"}.isdisjoint(value)


def _text(content: Any) -> tuple[str | None, set[str]]:
    """A message's text; of a list of parts that of its text parts, and the kinds of the others."""
    if not isinstance(content, list | tuple):
        return (content if isinstance(content, str) else None), set()
    texts, others = list[str](), set[str]()
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(text, str):
            texts.append(text)
        else:
            kind = part.get("type") if isinstance(part, Mapping) else None
            others.add(kind if isinstance(kind, str) else "of no type")
    return "\n".join(texts) or None, others


def _named(kinds: set[str]) -> str:
    return f" (parts: {shorten(', '.join(sorted(kinds)))})" if kinds else ""


def field_names(record: Any) -> tuple[str, ...]:
    """What a record has instead, for a message."""
    if isinstance(record, Mapping):
        return tuple(str(key) for key in record)
    return (f"(no fields: {type(record).__name__})",)
