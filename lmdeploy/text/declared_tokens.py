"""What the files beside a tokenizer say of its tokens: names, added tokens with their ids, markers.

Read from tokenizer_config.json, special_tokens_map.json and added_tokens.json, in all the forms those have
had. Knows no vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from lmdeploy.errors import ModelError
from lmdeploy.models.fields import shown
from lmdeploy.models.files import is_there, read_json

NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_SWITCHES = ("add_bos_token", "add_eos_token", "add_prefix_space", "legacy")
_FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")


@dataclass(frozen=True, slots=True)
class DeclaredTokens:
    """named: bos_token, eos_token, ... -> text. added: id -> token. extra: further control tokens by text.
    config: tokenizer_config.json, or nothing."""

    named: Mapping[str, str]
    added: Mapping[int, AddedToken]
    extra: tuple[str, ...]
    config: Mapping[str, Any]

    def flag(self, name: str, default: bool) -> bool:
        value = self.config.get(name)
        return value if isinstance(value, bool) else default


def read_declared(directory: Path) -> DeclaredTokens:
    """Files that are missing say nothing; ModelError when one is damaged."""
    config = optional_json(directory / "tokenizer_config.json")
    for name in _SWITCHES:
        if not isinstance(config.get(name), bool | None):
            raise ModelError(
                f"{directory / 'tokenizer_config.json'}: {name} is {shown(config[name])}; true or false is"
                " expected."
            )
    special = optional_json(directory / "special_tokens_map.json")
    named: dict[str, str] = {}
    for name in NAMES:
        first = _named(config, name, directory / "tokenizer_config.json")
        second = _named(special, name, directory / "special_tokens_map.json")
        if (text := first or second) is not None:
            named[name] = text
    listed = [*_entries(special), *_entries(config)]
    extra = tuple(dict.fromkeys(text for entry in listed if (text := _text(entry)) is not None))
    control = {*named.values(), *extra}
    added = _added_by_text(directory / "added_tokens.json", control)
    added |= _added_decoder(config.get("added_tokens_decoder"), directory / "tokenizer_config.json")
    return DeclaredTokens(named, dict(sorted(added.items())), extra, config)


def optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if is_there(path) else {}


def _entries(content: Mapping[str, Any]) -> list[Any]:
    """Newer files call the list extra_special_tokens, where some give an object of name and token."""
    found: list[Any] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = content.get(key)
        if isinstance(value, Mapping):
            value = list(value.values())
        found += value if isinstance(value, list) else []
    return found


def _text(value: Any) -> str | None:
    """Files write a token as its text or as an object with `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _named(content: Mapping[str, Any], name: str, source: Path) -> str | None:
    """The text of bos_token and its like; None where there is none. ModelError when it is no token."""
    value = content.get(name)
    inner = value.get("content") if isinstance(value, Mapping) else value
    if inner is None and not isinstance(value, Mapping):
        return None
    if not isinstance(inner, str):
        raise ModelError(
            f"{source}: {name} is {shown(value)}; a text, an object with the text as its content, or null is"
            " expected."
        )
    return inner or None


def _added_decoder(value: Any, source: Path) -> dict[int, AddedToken]:
    """added_tokens_decoder: id (as text) -> object with content and flags, or the text alone."""
    found: dict[int, AddedToken] = {}
    for key, entry in (value if isinstance(value, Mapping) else {}).items():
        text = _text(entry)
        if text is None or not str(key).isdecimal():
            raise ModelError(f"{source}: added_tokens_decoder holds {key!r}, which is no id with its token.")
        flags = entry if isinstance(entry, Mapping) else {"special": True}
        found[int(key)] = AddedToken(text, **{flag: bool(flags.get(flag)) for flag in _FLAGS})
    return found


def _added_by_text(path: Path, control: set[str]) -> dict[int, AddedToken]:
    """added_tokens.json: text -> id, control tokens where another file names them so."""
    found: dict[int, AddedToken] = {}
    for text, i in optional_json(path).items():
        if not isinstance(i, int) or isinstance(i, bool) or i < 0:
            raise ModelError(f"{path}: {text!r} has no id but {i!r}.")
        found[i] = AddedToken(text, special=text in control, normalized=False)
    return found
