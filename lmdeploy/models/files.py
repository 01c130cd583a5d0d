"""Which files a model path means: a .gguf file, a directory with one, or a Hugging Face directory."""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lmdeploy.errors import ModelError, text_problem

Format = Literal["hf", "gguf"]
_LONGEST = 200  # characters of a path that messages repeat
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # of a surrogate pair


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """`path` is the directory for `hf` and the file for `gguf`."""

    format: Format
    path: Path


def locate(path: str | Path) -> ModelFiles:
    """Safetensors in a directory win over a GGUF file beside them. ModelError when nothing is there."""
    path = Path(path)
    mode = _mode(path)
    if mode is not None and stat.S_ISREG(mode):
        if path.suffix == ".gguf" or _first_bytes(path) == b"GGUF":
            return ModelFiles("gguf", path)
        raise ModelError(f"{path}: not a model: a .gguf file or a directory with config.json is expected.")
    if mode is None or not stat.S_ISDIR(mode):
        kind = "neither a file nor a directory" if os.path.lexists(path) else "no such file or directory"
        raise ModelError(f"{path}: {kind}.")
    files = _listing(path)
    gguf = [file for file in files if file.suffix == ".gguf" and is_there(file)]
    if any(file.suffix == ".safetensors" for file in files) or not gguf:
        return _hugging_face(path)
    if len(gguf) > 1:
        names = ", ".join(file.name for file in gguf[:4]) + (", ..." if len(gguf) > 4 else "")
        raise ModelError(f"{path}: holds {len(gguf)} .gguf files ({names}); give the path of one of them.")
    return ModelFiles("gguf", gguf[0])


def unreadable(path: str | Path, error: OSError) -> ModelError:
    """What the system says of a path, with its name (shortened: the user may have typed anything)."""
    text = str(path)
    text = text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}...{text[-_LONGEST // 2 :]}"
    return ModelError(f"{text}: cannot be read: {error.strerror or error}.")


def _mode(path: Path) -> int | None:
    """st_mode behind all links, None when there is nothing."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unreadable(path, error) from None


def _listing(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError as error:
        raise unreadable(directory, error) from None


def check_readable(path: Path) -> None:
    """For libraries that call any file they cannot open damaged."""
    _first_bytes(path)


def _first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(4)
    except OSError as error:
        raise unreadable(path, error) from None


def _hugging_face(path: Path) -> ModelFiles:
    if not is_there(path / "config.json"):
        raise ModelError(f"{path}: not a model directory: it holds neither config.json nor a .gguf file.")
    return ModelFiles("hf", path)


def is_there(path: Path) -> bool:
    """Whether an optional file exists; ModelError when its name is taken by what cannot be read as a file.

    A dangling link (a copied snapshot without its blobs), a folder or a pipe is damage, not absence.
    """
    mode = _mode(path)
    if mode is not None and stat.S_ISREG(mode):
        return True
    if mode is None and not os.path.lexists(path):
        return False
    what = "a link to nothing" if mode is None else "a directory" if stat.S_ISDIR(mode) else "no regular file"
    raise ModelError(f"{path}: is {what}; a file is expected, or nothing of this name.")


def read_text(path: Path) -> str:
    """A text file; a byte order mark at its start is none of the text. ModelError of one line."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise unreadable(path, error) from None
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ModelError(f"{path}: not UTF-8 text: byte {byte:#04x} at {error.start}.") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ModelError of one line when it is missing, unreadable or no object."""
    text = read_text(path)
    try:
        value = json.loads(text)
        # Escapes can spell half a character, which no text that is made from it could be encoded with.
        problem = text_problem(json.dumps(value, ensure_ascii=False)) if _HALF.search(text) else None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON: {str(error).splitlines()[0]}.") from None
    if problem is not None:
        raise ModelError(f"{path}: not valid text: written out, {problem}.")
    if not isinstance(value, dict):
        raise ModelError(f"{path}: a JSON object is expected, not {type(value).__name__}.")
    return value
