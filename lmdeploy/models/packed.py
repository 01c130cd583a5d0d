"""A model in packed form: a folder that `lmdeploy convert` writes and every command takes for a model.

    packed.json     what the model is, which files it was made from, a checksum of every piece of packed.bin
                    and of every other file of the folder
    packed.bin      weights as the native engine holds them in memory
    the rest        tokenizer, chat template and generation config, as beside the model; those in a GGUF file
                    become such files

Owns packed.json and the check that the folder is whole and no older than its source. Knows no layout:
`layout` is a name that the executor compares with its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from lmdeploy.errors import ModelError
from lmdeploy.models.checkpoint import Checkpoint, Source, TensorInfo
from lmdeploy.models.files import is_there, read_json
from lmdeploy.models.spec import ModelSpec
from lmdeploy.quant.tensors import StoredMatrix, Tensor

MANIFEST, WEIGHTS = "packed.json", "packed.bin"
FORM = 2  # of packed.json
PIECE = 4 << 20  # bytes of packed.bin with one checksum
_AGAIN = "convert the model again: lmdeploy convert MODEL DIR --force"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file that a model was made from, as it was then."""

    path: str  # absolute
    nbytes: int
    mtime_ns: int
    sha256: str


@dataclass(frozen=True, slots=True)
class TextFile:
    """One file beside packed.json and packed.bin, as it was written."""

    name: str  # in the folder
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Packed:
    """What packed.json says. model_format, tensors and notes are the source's; checksums: of each PIECE."""

    form: int
    lmdeploy: str
    layout: str
    model_format: str
    sources: tuple[SourceFile, ...]
    files: tuple[TextFile, ...]
    spec: ModelSpec
    tensors: dict[str, TensorInfo]
    notes: tuple[str, ...]
    nbytes: int
    checksums: tuple[int, ...]


def is_packed(path: str | Path) -> bool:
    """Whether a path is a folder in packed form, sound or not."""
    return any(os.path.isfile(Path(path) / name) for name in (MANIFEST, WEIGHTS))


def open_packed(path: str | Path, model_format: str | None) -> Checkpoint:
    """The checkpoint of such a folder: headers as of the source, values only in packed form. ModelError when
    it is damaged, foreign or older than its source."""
    directory = Path(path)
    packed = read_packed(directory)
    _check_weights(directory, packed)
    for file in packed.files:
        _check_text(directory, file)
    _check_sources(directory, packed.sources)
    if model_format not in (None, packed.model_format):
        raise ModelError(
            f"{directory}: model_format is {model_format!r}, but the folder was converted from"
            f" {packed.model_format!r} files; leave it out."
        )
    store = PackedStore(directory, packed)
    return Checkpoint(packed.spec, store, _Identity(), lambda _: False, packed=packed)


def read_packed(directory: Path) -> Packed:
    """packed.json alone. ModelError when it is missing, damaged or from another version."""
    path = directory / MANIFEST
    if not is_there(path):
        raise ModelError(f"{directory}: {MANIFEST} is missing beside {WEIGHTS}; {_AGAIN}.")
    try:
        values = read_json(path)
    except ModelError as error:
        raise ModelError(f"{error.message.rstrip('.')}: the file is damaged; {_AGAIN}.") from None
    body = values.get("packed")
    if not isinstance(body, dict) or "sha256" not in values:
        raise ModelError(f"{path}: not written by `lmdeploy convert`; {_AGAIN}.")
    if values["sha256"] != _digest(body):
        raise ModelError(f"{path}: its contents do not match its checksum: the file is damaged; {_AGAIN}.")
    if body.get("form") != FORM:
        raise ModelError(
            f"{path}: written in form {body.get('form')!r} by lmdeploy {body.get('lmdeploy')}; this version"
            f" reads form {FORM}; {_AGAIN}."
        )
    try:
        return msgspec.convert(body, Packed, strict=True)
    except msgspec.ValidationError as error:
        raise ModelError(f"{path}: written by another version of lmdeploy ({error}); {_AGAIN}.") from None


def write_packed(directory: Path, packed: Packed) -> None:
    """packed.json; the folder is complete when it is there."""
    body = msgspec.to_builtins(packed)
    (directory / MANIFEST).write_text(json.dumps({"sha256": _digest(body), "packed": body}))


def files_of(directory: Path) -> tuple[TextFile, ...]:
    """Every file that is in a folder beside packed.json and packed.bin; reads all of each."""
    found = {str(path.relative_to(directory)): path for path in directory.rglob("*") if path.is_file()}
    texts = [(name, path) for name, path in sorted(found.items()) if name not in (MANIFEST, WEIGHTS)]
    return tuple(TextFile(name, path.stat().st_size, file_digest(path)) for name, path in texts)


def own_names(directory: Path, usual: set[str]) -> set[str]:
    """The files of a folder in packed form that a conversion wrote. usual: those of one whose packed.json is
    damaged or of another version."""
    with contextlib.suppress(ModelError):
        usual = {file.name for file in read_packed(directory).files}
    return {MANIFEST, WEIGHTS} | usual


def source_file(path: Path) -> SourceFile:
    """As it is now; reads all of it."""
    state = path.stat()
    return SourceFile(str(path.resolve()), state.st_size, state.st_mtime_ns, file_digest(path))


def file_digest(path: Path) -> str:
    """SHA-256 in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while data := file.read(PIECE):
            digest.update(data)
    return digest.hexdigest()


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _check_weights(directory: Path, packed: Packed) -> None:
    path = directory / WEIGHTS
    if not is_there(path):
        raise ModelError(f"{path}: the packed weights are missing; {_AGAIN}.")
    found = path.stat().st_size
    if found != packed.nbytes:
        what = "cut off" if found < packed.nbytes else "not the one"
        raise ModelError(
            f"{path}: has {found} bytes, {packed.nbytes} were written: the file is {what}; {_AGAIN}."
        )


def _check_text(directory: Path, file: TextFile) -> None:
    """Other words around the same weights give wrong answers that look right."""
    path = directory / file.name
    if not is_there(path):
        raise ModelError(f"{path}: is missing: it was written beside the weights; {_AGAIN}.")
    if path.stat().st_size != file.nbytes or file_digest(path) != file.sha256:
        raise ModelError(f"{path}: is not the file that was written beside the weights; {_AGAIN}.")


def _check_sources(directory: Path, sources: tuple[SourceFile, ...]) -> None:
    """A source that is gone is none of our business; one that has changed is: the user means the new one."""
    for source in sources:
        if _has_changed(source):
            first = Path(sources[0].path)
            model = first if first.suffix == ".gguf" else first.parent
            raise ModelError(
                f"{directory}: is out of date: {source.path} has changed since it was converted; convert the"
                f" model again: lmdeploy convert {model} {directory} --force"
            )


def _has_changed(source: SourceFile) -> bool:
    path = Path(source.path)
    try:
        state = path.stat()
    except OSError:
        return False
    if (state.st_size, state.st_mtime_ns) == (source.nbytes, source.mtime_ns):
        return False
    return state.st_size != source.nbytes or file_digest(path) != source.sha256


class _Identity(dict[str, Source]):
    """Canonical names stand for themselves, in every layer."""

    def __missing__(self, pattern: str) -> Source:
        return Source(pattern)


class PackedStore:
    """Headers by canonical name; values are not had one by one."""

    def __init__(self, directory: Path, packed: Packed) -> None:
        self.source, self.notes, self.model_format = str(directory), packed.notes, packed.model_format
        self.files = (directory / MANIFEST, directory / WEIGHTS)
        self._packed = packed

    def names(self) -> Iterable[str]:
        return self._packed.tensors.keys()

    def info(self, name: str) -> TensorInfo:
        return self._packed.tensors[name]

    def read(self, name: str) -> Tensor:
        raise ModelError(
            f"{self.source}: holds weights packed for the native engine only; give the model it was made from"
            f" ({Path(self._packed.sources[0].path).parent})."
        )

    def groups(self, name: str) -> npt.NDArray[np.integer]:
        raise KeyError(name)

    def stored_matrix(self, name: str) -> StoredMatrix | None:
        return None

    def release(self, name: str) -> None:
        pass

    def close(self) -> None:
        pass
