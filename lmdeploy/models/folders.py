"""A folder to write: which place is meant, and how it appears there, complete or not at all.

It is made beside its place under another name, `.NAME.*.partial`, and renamed; what was there is
`.NAME.*.old` meanwhile. Every such folder is locked by the process that makes it, so what a killed process
left is told from what is being made, and cleared by the next one. Knows nothing of what is in the folders.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lmdeploy.errors import ConfigError


@contextmanager
def in_one_go(target: Path, check: Callable[[], None]) -> Iterator[Path]:
    """A new folder to fill, which becomes `target` (absolute, no link) when nothing failed.

    check: called again right before, when others may have used the place; what it raises ends all. OSError.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent) as alone:
        if alone:
            _clear(target)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
        held = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
        lock(held)
    try:
        partial.chmod(0o777 & ~_umask())
        yield partial
        with _locked(target.parent):
            check()
            take_place(partial, target, partial.with_suffix(".old"))
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(held)


def meant_place(directory: Path) -> Path:
    """The place that is meant, without `..` and links on the way to it. ConfigError where none can be
    written, and for a link but to an empty folder: a link is never replaced, what it leads to may be."""
    if directory.is_symlink() and not (directory.is_dir() and not any(directory.iterdir())):
        raise ConfigError(f"{directory} is a link to {os.readlink(directory)}; name the folder itself")
    target = Path(os.path.realpath(directory))
    if Path.cwd().is_relative_to(target):
        raise ConfigError(f"{directory} is the current folder or above it; run this from another one")
    if os.path.ismount(target):
        raise ConfigError(f"{directory} is where a disk is mounted, and is not replaced; name a folder in it")
    return target


def free_bytes(directory: Path) -> int:
    """On the disk where `directory` is, or will be. ConfigError where nothing can be written."""
    parent = directory.absolute()
    while not parent.exists():
        parent = parent.parent
    total, _, free = shutil.disk_usage(parent)
    if total == 0:
        raise ConfigError(f"{directory} cannot be written: {parent} is no place for files")
    return free


def take_place(partial: Path, target: Path, old: Path) -> None:
    """What is at `target` goes (by way of `old`), or is back in its place when that fails."""
    if not target.exists():
        partial.rename(target)
        return
    target.rename(old)
    try:
        partial.rename(target)
    except BaseException:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _clear(target: Path) -> None:
    """Undo what killed processes left. The parent is locked, so nobody is between two renames."""
    for path in target.parent.iterdir():
        if not path.name.startswith(f".{target.name}.") or path.is_symlink() or not path.is_dir():
            continue
        if path.suffix == ".old" and not target.exists():
            path.rename(target)
        elif path.suffix == ".old" or (path.suffix == ".partial" and not _in_use(path)):
            shutil.rmtree(path, ignore_errors=True)


def _in_use(path: Path) -> bool:
    held = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(held)
    return False


@contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Waits for others that hold the lock. False where the file system knows no locks. OSError."""
    held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield lock(held)
    finally:
        os.close(held)


def lock(held: int) -> bool:
    """Wait for the lock of an open folder. False where the file system knows no locks."""
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
