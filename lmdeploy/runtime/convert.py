"""`lmdeploy convert`: a model's weights packed once, in a folder that stands for the model from then on.

Decides nothing of the layout. The folder appears complete or not at all: it is made beside its place under
another name, and renamed. Memory and disk are checked before anything is written.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lmdeploy import __version__
from lmdeploy.config import TurbomindEngineConfig
from lmdeploy.errors import CapacityError, ConfigError
from lmdeploy.models.checkpoint import Checkpoint
from lmdeploy.models.files import locate
from lmdeploy.models.packed import FORM, Packed, is_packed, source_file, write_packed
from lmdeploy.models.registry import open_checkpoint
from lmdeploy.runtime.loading import Loading
from lmdeploy.runtime.machine import Machine, read_machine
from lmdeploy.runtime.memory_plan import PROCESS_BYTES, size
from lmdeploy.text.chat_template import own_templates
from lmdeploy.text.sources import read_source, write_as_files
from lmdeploy.turbomind.layout import ModelLayout, model_layout

_TEXT_SUFFIXES = {".json", ".jinja", ".model", ".txt", ".tiktoken"}
_TEMPLATES = "additional_chat_templates"


@dataclass(frozen=True, slots=True)
class Converted:
    """What came of it."""

    directory: Path
    nbytes: int  # of packed weights


def convert(
    path: Path,
    directory: Path,
    config: TurbomindEngineConfig | None = None,
    *,
    force: bool = False,
    machine: Machine | None = None,
) -> Converted:
    """Write the model at `path` to `directory` in packed form. ModelError, ConfigError, CapacityError."""
    machine, config = machine or read_machine(), config or TurbomindEngineConfig()
    _check_places(path, directory, force)
    checkpoint = open_checkpoint(path, config.model_format)
    try:
        headers = {name: checkpoint.info(name) for name in checkpoint.names()}
        layout = model_layout(checkpoint.spec, headers, dtype=config.dtype)
        _check_memory(checkpoint, layout, machine)
        _check_disk(_texts(path), layout.nbytes, directory)
        with _in_one_go(directory) as partial:
            _write(path, checkpoint, layout, partial, config.num_threads or machine.cores)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error.strerror or error}") from None
    finally:
        checkpoint.close()
    return Converted(directory, layout.nbytes)


def _check_places(path: Path, directory: Path, force: bool) -> None:
    if is_packed(path):
        raise ConfigError(f"{path} is in packed form already; every command takes it as it is")
    if not os.path.lexists(directory):
        return
    if not directory.is_dir():
        raise ConfigError(f"{directory} is no folder; name a new one")
    if not any(directory.iterdir()):
        return
    if not is_packed(directory):
        raise ConfigError(f"{directory} holds other files; name a new folder")
    if not force:
        raise ConfigError(f"{directory} holds a converted model; --force replaces it")


def _check_memory(checkpoint: Checkpoint, layout: ModelLayout, machine: Machine) -> None:
    largest = max(checkpoint.info(name).file_bytes for name in checkpoint.names())
    needed = layout.nbytes + 2 * largest + PROCESS_BYTES
    if needed > machine.memory_free:
        raise CapacityError(
            f"packing takes {size(needed)} of memory ({size(layout.nbytes)} of it weights), but"
            f" {size(machine.memory_free)} are free; convert on a larger machine: the folder can be copied"
        )


def _check_disk(texts: list[tuple[Path, Path]], weights: int, directory: Path) -> None:
    parent = directory.absolute().parent
    while not parent.exists():
        parent = parent.parent
    needed = weights + sum(source.stat().st_size for source, _ in texts) + (16 << 20)
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise CapacityError(
            f"{directory} would take {size(needed)}, but {size(free)} are free on the disk of {parent}"
        )


@contextmanager
def _in_one_go(directory: Path) -> Iterator[Path]:
    """A folder beside `directory` that takes its place, and that of what is there, when nothing failed."""
    target = directory.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    try:
        partial.chmod(0o777 & ~_umask())
        yield partial
        if target.exists():
            old = partial.with_suffix(".old")
            target.rename(old)
            partial.rename(target)
            shutil.rmtree(old, ignore_errors=True)
        else:
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _write(path: Path, checkpoint: Checkpoint, layout: ModelLayout, partial: Path, threads: int) -> None:
    from lmdeploy.turbomind.convert import pack
    from lmdeploy.turbomind.packed import layout_name, write_weights

    written = [0]
    with ThreadPoolExecutor(1) as beside:
        sources = beside.submit(lambda: tuple(source_file(file) for file in checkpoint.files))
        with Loading(layout.nbytes, "packing"):
            model = pack(checkpoint, layout, threads)
        with Loading(layout.nbytes, "writing", lambda: written[0]):
            checksums = write_weights(model, partial, lambda count: written.__setitem__(0, count))
    packed = Packed(
        form=FORM,
        lmdeploy=__version__,
        layout=layout_name(layout),
        model_format=checkpoint.model_format,
        sources=sources.result(),
        spec=checkpoint.spec,
        tensors={name: checkpoint.info(name) for name in sorted(checkpoint.names())},
        notes=checkpoint.notes,
        nbytes=layout.nbytes,
        checksums=checksums,
    )
    for source, target in _texts(path):
        (partial / target).parent.mkdir(exist_ok=True)
        shutil.copyfile(source, partial / target)
    if locate(path).format == "gguf":
        write_as_files(read_source(path), own_templates(path), partial)
    write_packed(partial, packed)


def _texts(path: Path) -> list[tuple[Path, Path]]:
    """Everything beside the weights that says how to use them: (file, its place in the folder)."""
    folder = path if path.is_dir() else path.parent
    if locate(path).format == "gguf":
        beside = [folder / "generation_config.json"]  # all else is in the file
    else:
        beside = [*sorted(folder.iterdir()), *sorted((folder / _TEMPLATES).glob("*.jinja"))]
    wanted = [f for f in beside if f.suffix in _TEXT_SUFFIXES and not f.name.endswith(".index.json")]
    return [(file, file.relative_to(folder)) for file in wanted if file.is_file()]
