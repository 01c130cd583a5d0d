"""Tokenizers made from other formats are kept as tokenizer.json in the user's cache folder.

A file is named after the content it was made from, so nothing in it can be out of date. A cache that cannot
be written costs a warning and time, nothing else.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers

from lmdeploy.env import XDG_CACHE_HOME
from lmdeploy.logging import get_logger

_VERSION = 2  # of the converters: what they make of the same content


def content_key(*parts: Any) -> str:
    """A name for bytes, texts and JSON values together."""
    digest = hashlib.sha256(f"{_VERSION}".encode())
    for part in parts:
        data = part if isinstance(part, bytes) else json.dumps(part, sort_keys=True).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def converted(key: str, convert: Callable[[], tokenizers.Tokenizer]) -> tokenizers.Tokenizer:
    """The tokenizer kept under `key`, or what `convert` makes, which is then kept."""
    path = cache_folder() / f"{key}.json"
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception:  # missing or damaged, and the library raises nothing more specific
        made = convert()
    try:
        _write(path, made.to_str())
    except OSError as error:
        get_logger().warning(
            "tokenizer cache %s cannot be written (%s): the tokenizer is converted anew each time",
            path.parent,
            error.strerror or error,
        )
    return made


def cache_folder() -> Path:
    return Path(XDG_CACHE_HOME.text() or Path.home() / ".cache") / "lmdeploy" / "tokenizers"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".partial")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
