"""The access log: one JSON object a line for each request, without a word of prompts or answers.

Prompts are in it only where that was asked for. Owns the fields of a line and the file. Knows no route.
"""

from __future__ import annotations

import datetime
import logging
import os
from typing import Any

import msgspec

from lmdeploy.errors import ConfigError
from lmdeploy.serve.passage import Passage
from lmdeploy.serve.record import Record

logger = logging.getLogger("lmdeploy.serve")


class AccessLog:
    """Writes records to a file, which may be moved away at any time if `reopen` is called; `-`: stdout.

    Raises ConfigError when the file cannot be written.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = self._open()
        self._failing = False

    def write(self, record: Record) -> None:
        """A full disk costs lines, and no request."""
        line = msgspec.json.encode(line_of(record)) + b"\n"
        try:
            os.write(self._file, line)  # in one piece: several processes may share the file
        except OSError as error:
            if not self._failing:
                logger.error("the access log cannot be written: %s", error.strerror)
            self._failing = True
        else:
            self._failing = False

    def reopen(self) -> None:
        """Go on in a file of the old name: the old one was moved away."""
        if self._path != "-":
            fresh = self._open()
            os.dup2(fresh, self._file)
            os.close(fresh)

    def close(self) -> None:
        if self._path != "-":
            os.close(self._file)

    def _open(self) -> int:
        if self._path == "-":
            return 1
        try:
            return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise ConfigError(f"--access-log {self._path}: {error.strerror}") from None


def line_of(record: Record) -> dict[str, Any]:
    """Times in milliseconds; fields that say nothing are left out."""
    moment = datetime.datetime.fromtimestamp(record.at, datetime.timezone.utc)
    fields = {
        "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "request_id": record.request_id,
        "client": record.client,
        "key": record.key,
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "ms": _ms(record.ended - record.began),
        "bytes": record.sent,
        "model": record.model,
        "reply_id": record.reply_id,
        "answers": [_answer(passage) for passage in record.passages],
        "error": record.error,
        "left": None if record.complete else True,  # the client did, before the end
        "prompt": record.prompt,
    }
    return {name: value for name, value in fields.items() if value not in ("", None, [])}


def _answer(passage: Passage) -> dict[str, Any]:
    """One choice of one prompt. Of a time that was not reached there is no field."""
    begin = passage.submitted
    fields = {
        "prompt_tokens": passage.prompt_tokens,
        "cached_tokens": passage.cached_tokens,
        "completion_tokens": passage.generated,
        "queue_ms": _ms(passage.started - begin) if passage.started else None,
        "ttft_ms": _ms(passage.first - begin) if passage.first else None,
        "ms": _ms(passage.ended - begin) if passage.ended else None,
        "end": passage.reason,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
