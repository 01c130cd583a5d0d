"""API keys: where they come from, and who a key belongs to.

Keeps digests only. A file of keys is read again when it changes; one that cannot be read leaves the keys as
they are. Knows no HTTP.

A file has one key a line, `KEY` or `NAME KEY`; `KEY` may be `sha256:` and the 64 digits of its SHA-256, so
that the file is worth nothing to whoever finds it. Empty lines and what follows `#` at the start of a line
do not count.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmdeploy.errors import ConfigError, shorten

logger = logging.getLogger("lmdeploy.serve")

_HASHED = re.compile(r"sha256:([0-9a-f]{64})", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Key:
    """`name` stands for it in logs and metrics and says nothing about it."""

    name: str
    digest: bytes


def key_of(secret: str, name: str = "") -> Key:
    """The key `secret`, or the one whose hash it states. Raises ConfigError."""
    hashed = _HASHED.fullmatch(secret)
    if hashed is None and secret.lower().startswith("sha256:"):
        raise ConfigError("an API key that begins with sha256: needs 64 hexadecimal digits after it")
    digest = bytes.fromhex(hashed[1]) if hashed else _digest(secret)
    return Key(name or f"key-{digest.hex()[:8]}", digest)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


class Keys:
    """All keys that let a client in; without any, everybody may.

    given: keys, hashes, and `@FILE` for the keys in a file. Raises ConfigError.
    """

    def __init__(self, given: Iterable[str] = ()) -> None:
        words = list(given)
        self._fixed = [key_of(word) for word in words if not word.startswith("@")]
        self._files = [Path(word[1:]) for word in words if word.startswith("@")]
        self._stamps: list[object] = []
        self._keys: tuple[Key, ...] = ()
        self._read()

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def required(self) -> bool:
        """Whether a client needs a key; a file that holds none shuts everybody out."""
        return bool(self._keys or self._files)

    def find(self, offered: Sequence[str]) -> Key | None:
        """The key that is among those offered. Compares with every key, in the same time whichever it is."""
        found = None
        for secret in offered:
            digest = _digest(secret)
            for key in self._keys:
                if hmac.compare_digest(digest, key.digest):
                    found = key
        return found

    def refresh(self) -> bool:
        """Read changed files again; True when the keys were replaced. A file at fault changes nothing."""
        if self._stamps == [_stamp(path) for path in self._files]:
            return False
        try:
            self._read()
        except ConfigError as error:
            logger.error("the keys stay as they were: %s", error.message)
            self._stamps = [_stamp(path) for path in self._files]
            return False
        logger.warning("read the API keys anew: %d now", len(self._keys))
        return True

    def _read(self) -> None:
        # Before the contents: a change in between is then seen the next time.
        stamps = [_stamp(path) for path in self._files]
        keys = {key.digest: key for key in self._fixed}
        for path in self._files:
            keys |= {key.digest: key for key in _read_file(path)}
        self._keys, self._stamps = tuple(keys.values()), stamps


def _stamp(path: Path) -> object:
    try:
        seen = path.stat()
    except OSError:
        return None
    return seen.st_mtime_ns, seen.st_size, seen.st_ino


def _read_file(path: Path) -> list[Key]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"file of API keys {shorten(str(path))} cannot be read: {reason}") from None
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2:
            raise ConfigError(
                f"file of API keys {shorten(str(path))}, line {number}: a line is KEY or NAME KEY, "
                f"got {len(words)} words"
            )
        try:
            keys.append(key_of(words[-1], words[0] if len(words) == 2 else ""))
        except ConfigError as error:
            raise ConfigError(
                f"file of API keys {shorten(str(path))}, line {number}: {error.message}"
            ) from None
    return keys
