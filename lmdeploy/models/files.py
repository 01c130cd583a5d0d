"""Which files a model path means: a .gguf file, a directory with one, or a Hugging Face directory."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lmdeploy.errors import ModelError, text_problem

Format = Literal["hf", "gguf"]
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # of a surrogate pair


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """`path` is the directory for `hf` and the file for `gguf`."""

    format: Format
    path: Path


def locate(path: str | Path) -> ModelFiles:
    """Safetensors in a directory win over a GGUF file beside them. ModelError when nothing is there."""
    path = Path(path)
    if path.is_file():
        if path.suffix == ".gguf" or path.open("rb").read(4) == b"GGUF":
            return ModelFiles("gguf", path)
        raise ModelError(f"{path}: not a model: a .gguf file or a directory with config.json is expected.")
    if not path.is_dir():
        kind = "neither a file nor a directory" if os.path.lexists(path) else "no such file or directory"
        raise ModelError(f"{path}: {kind}.")
    gguf = [file for file in sorted(path.glob("*.gguf")) if is_there(file)]
    if any(path.glob("*.safetensors")) or not gguf:
        return _hugging_face(path)
    if len(gguf) > 1:
        names = ", ".join(file.name for file in gguf[:4]) + (", ..." if len(gguf) > 4 else "")
        raise ModelError(f"{path}: holds {len(gguf)} .gguf files ({names}); give the path of one of them.")
    return ModelFiles("gguf", gguf[0])


def _hugging_face(path: Path) -> ModelFiles:
    if not is_there(path / "config.json"):
        raise ModelError(f"{path}: not a model directory: it holds neither config.json nor a .gguf file.")
    return ModelFiles("hf", path)


def is_there(path: Path) -> bool:
    """Whether an optional file exists; ModelError when its name is taken by what cannot be read as a file.

    A dangling link (a copied snapshot without its blobs), a folder or a pipe is damage, not absence.
    """
    if path.is_file():
        return True
    if not os.path.lexists(path):
        return False
    what = "a link to nothing" if not path.exists() else "a directory" if path.is_dir() else "no regular file"
    raise ModelError(f"{path}: is {what}; a file is expected, or nothing of this name.")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ModelError of one line when it is missing, unreadable or no object."""
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text)
        # Escapes can spell half a character, which no text that is made from it could be encoded with.
        problem = text_problem(json.dumps(value, ensure_ascii=False)) if _HALF.search(text) else None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON: {str(error).splitlines()[0]}.") from None
    if problem is not None:
        raise ModelError(f"{path}: not valid text: written out, {problem}.")
    if not isinstance(value, dict):
        raise ModelError(f"{path}: a JSON object is expected, not {type(value).__name__}.")
    return value
