"""The questions a model is asked: the built-in ones, kept as data, and those of a user's file.

One line of JSON each. Built-in: id, group, turns (what the user says, one after the other), check (rules of
`scoring`), max_tokens. A user's file has `prompt` or `messages` (the last from the user), and may have
`expected` (a text or several, one of which must be in the answer), `regex`, `json_schema`, `check`,
`max_tokens`, `group` and `id`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmdeploy.errors import ConfigError, text_problem
from lmdeploy.quality.scoring import check_rules

GROUPS = ("facts", "instructions", "json", "code", "multi-turn", "arithmetic")
OWN_GROUP = "own questions"
_BUILT_IN = Path(__file__).with_name("items.jsonl")
_FIELDS = (
    "id",
    "group",
    "prompt",
    "messages",
    "expected",
    "regex",
    "json_schema",
    "check",
    "max_tokens",
)
_MOST_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Item:
    """before: messages that stand before the first turn."""

    id: str
    group: str
    turns: tuple[str, ...]
    check: Mapping[str, Any]
    max_tokens: int
    before: tuple[Mapping[str, str], ...] = field(default=())


def built_in_items() -> list[Item]:
    """96 of them, 16 of each group."""
    lines = _BUILT_IN.read_text(encoding="utf-8").splitlines()
    return [Item(**{**one, "turns": tuple(one["turns"])}) for one in map(json.loads, lines)]


def read_items(file: str) -> list[Item]:
    """Of a user's file. ConfigError names file and line."""
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise ConfigError(f"--eval-file {file} cannot be read: {reason}") from None
    items = [
        _item(line, f"--eval-file {file}, line {number}", number)
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip()
    ]
    if not items:
        raise ConfigError(f"--eval-file {file} holds no question")
    return items


def _item(line: str, where: str, number: int) -> Item:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: no JSON ({getattr(error, 'msg', 'nested too deeply')})") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: an object is expected")
    problem = text_problem(json.dumps(record, ensure_ascii=False))
    if problem is not None:
        raise ConfigError(f"{where}: {problem}")
    for name in record:
        if name not in _FIELDS:
            raise ConfigError(f"{where}: there is no field {name!r} (known: {', '.join(_FIELDS)})")
    before, turn = _question(record, where)
    most = record.get("max_tokens", 256)
    if isinstance(most, bool) or not isinstance(most, int) or not 1 <= most <= _MOST_TOKENS:
        raise ConfigError(f"{where}: max_tokens must be a whole number from 1 to {_MOST_TOKENS}")
    group = str(record.get("group", OWN_GROUP))
    check = _rules(record, where)
    return Item(str(record.get("id", f"line {number}")), group, (turn,), check, most, before)


def _question(record: Mapping[str, Any], where: str) -> tuple[tuple[Mapping[str, str], ...], str]:
    """Messages before the last, and the last."""
    if ("prompt" in record) == ("messages" in record):
        raise ConfigError(f"{where}: one of prompt and messages is expected")
    messages = record.get("messages", [{"role": "user", "content": record.get("prompt")}])
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where}: messages must be a list that is not empty")
    for message in messages:
        good = isinstance(message, dict) and message.get("role") in ("system", "user", "assistant")
        if not good or not isinstance(message.get("content"), str):
            raise ConfigError(f"{where}: a message has a role (system, user, assistant) and a content (text)")
    if messages[-1]["role"] != "user":
        raise ConfigError(f"{where}: the last message must be the user's")
    before = tuple({"role": m["role"], "content": m["content"]} for m in messages[:-1])
    return before, messages[-1]["content"]


def _rules(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    check = record.get("check", {})
    check_rules(check, f"{where}: check")
    check = dict(check)
    for name, rule in (("expected", "contains"), ("regex", "regex"), ("json_schema", "json")):
        if name in record:
            check[rule] = record[name]
    check_rules(check, where)
    for rule in ("contains", "contains_all", "excludes", "equals", "regex"):
        values = check.get(rule, [])
        if isinstance(values, list) and not all(isinstance(value, str) for value in values):
            raise ConfigError(f"{where}: {rule} must be texts")
    return check
