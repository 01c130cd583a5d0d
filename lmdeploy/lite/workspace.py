"""The folder of a result while it is made: D.partial, which becomes D when all is there.

Owns where a result may be written, the lock, what a run that was killed has finished (for the next one with
the same job), and what is removed after a failure. Knows no tensor and no algorithm.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from lmdeploy.errors import CapacityError, ConfigError, LMDeployError, shorten
from lmdeploy.models.files import read_json
from lmdeploy.models.folders import free_bytes, meant_place, take_place

RECORD = "lmdeploy_lite.json"  # in a result: what it was made of and how, and which files are ours
REPORT_FILES = ("quality.json", "quality.html")  # put beside a result when it is measured
_JOB, _WORK = "job.json", "work"
_TOLD = 3  # differences of two jobs that a message names
Job = Mapping[str, Any]


class Workspace:
    """A context: what leaves it by an error removes D.partial, but for being stopped from outside (Ctrl-C, a
    signal): then the next run with the same job goes on from there."""

    def __init__(self, directory: Path, job: Job, *, force: bool = False) -> None:
        """job: JSON values that decide the result. force: replace an earlier result, drop an unfinished
        one. ConfigError, before anything is written."""
        self.target = meant_place(directory)
        self._job, self._force = json.loads(json.dumps(job)), force
        check_place(self.target, force)
        self.partial = _partial(self.target)
        self._held = -1
        self.resumed = False

    @property
    def work(self) -> Path:
        """For files that are no part of the result."""
        return self.partial / _WORK

    def __enter__(self) -> Workspace:
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self.partial.mkdir(exist_ok=True)
            self._held = os.open(self.partial, os.O_RDONLY | os.O_DIRECTORY)
            _lock(self._held, self.partial)
            self._begin()
        except OSError as error:
            self._let_go()
            raise _cannot_write(self.partial, error) from None
        except BaseException:
            self._let_go()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            shutil.rmtree(self.partial, ignore_errors=True)
        self._let_go()
        if isinstance(error, OSError):
            raise _cannot_write(self.target, error) from error

    def check_space(self, needed: int) -> None:
        """CapacityError unless so many more bytes fit on the disk."""
        free = free_bytes(self.partial)
        if needed > free:
            raise CapacityError(
                f"{self.target} takes {needed / 1e9:.2f} GB while it is made, but {free / 1e9:.2f} GB are"
                " free on its disk"
            )

    def finish(self, record: Mapping[str, Any]) -> None:
        """The result is complete: it takes its place. record: what is written of it as RECORD."""
        shutil.rmtree(self.work, ignore_errors=True)
        files = {str(p.relative_to(self.partial)) for p in self.partial.rglob("*") if p.is_file()} - {_JOB}
        write_json(self.partial / RECORD, {**record, "files": sorted(files)})
        (self.partial / _JOB).unlink()
        check_place(self.target, self._force)
        take_place(self.partial, self.target, self.target.with_name(f".{self.target.name}.old"))

    def _begin(self) -> None:
        """Take up what is there, or begin anew."""
        there = {path.name for path in self.partial.iterdir()}
        _check_unfinished(self.partial)
        if _JOB in there and not self._force:
            other = list(_differences(read_json(self.partial / _JOB), self._job))
            if other:
                more = f" and {len(other) - _TOLD} more" if len(other) > _TOLD else ""
                raise ConfigError(
                    f"{self.partial} holds an unfinished run of another job: {', '.join(other[:_TOLD])}"
                    f"{more}; it goes on with the same model, text and flags, --force starts anew, or name"
                    " another folder"
                )
            self.resumed = True
            return
        for path in self.partial.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        write_json(self.partial / _JOB, self._job)
        self.work.mkdir()

    def _let_go(self) -> None:
        if self._held >= 0:
            os.close(self._held)
            self._held = -1


def check_output(directory: Path, force: bool) -> None:
    """What a `Workspace` there would refuse whatever the job is; nothing is written. ConfigError."""
    target = meant_place(directory)
    check_place(target, force)
    free_bytes(target)
    parent = next(path for path in target.parents if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{target} cannot be written: no right to write to {parent}")
    partial = _partial(target)
    if partial.is_dir():
        held = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _lock(held, partial)
        finally:
            os.close(held)
        _check_unfinished(partial)


def _partial(target: Path) -> Path:
    return target.with_name(target.name + ".partial")


def _lock(held: int, partial: Path) -> None:
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"{partial} is being written by another process") from None
    except OSError:  # the file system knows no locks
        return


def _check_unfinished(partial: Path) -> None:
    there = {path.name for path in partial.iterdir()}
    if there and not there & {_JOB, _JOB + ".tmp", RECORD}:
        raise ConfigError(f"{partial} holds other files; move them away or name another folder")


def _differences(before: Job, now: Job, inside: str = "") -> Iterator[str]:
    """What was, and is, of every value that differs."""
    for key in {**before, **now}:
        was, is_ = before.get(key), now.get(key)
        if isinstance(was, dict) and isinstance(is_, dict):
            yield from _differences(was, is_, f"{inside}{key}.")
        elif was != is_:
            yield f"{inside}{key} was {shorten(was)}, is {shorten(is_)}"


def check_place(target: Path, force: bool) -> None:
    """That a result may be written there. ConfigError."""
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise ConfigError(f"{target} is no folder; name a new one")
    there = {str(path.relative_to(target)) for path in target.rglob("*") if not path.is_dir()}
    if not there:
        return
    if RECORD not in there:
        raise ConfigError(f"{target} holds other files; name a new folder with --work-dir")
    others = sorted(there - {RECORD, *REPORT_FILES, *read_json(target / RECORD).get("files", [])})
    if others:
        raise ConfigError(
            f"{target} holds other files beside an earlier result ({shorten(', '.join(others[:3]))}); move"
            " them away or name a new folder with --work-dir"
        )
    if not force:
        raise ConfigError(f"{target} holds an earlier result; --force replaces it")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    partial = path.with_name(path.name + ".tmp")
    partial.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(path)


def _cannot_write(path: Path, error: OSError) -> LMDeployError:
    if error.errno == errno.ENOSPC:
        return CapacityError(f"{path}: the disk is full; nothing of the result was kept")
    return ConfigError(f"{path} cannot be written: {error.strerror or error}")
