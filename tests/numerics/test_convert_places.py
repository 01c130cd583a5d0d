"""What `lmdeploy convert` replaces and what it never touches; what is left when it is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lmdeploy.cli import smoke
from lmdeploy.cli.main import main
from lmdeploy.errors import ConfigError, ModelError
from lmdeploy.models import folders
from lmdeploy.models.packed import MANIFEST
from lmdeploy.models.registry import open_checkpoint
from lmdeploy.runtime.convert import convert


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    smoke.write_model(path)
    (path / "generation_config.json").write_text('{"temperature": 0.5}')
    return path


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    convert(model, tmp_path / "place" / "packed")
    return tmp_path / "place" / "packed"


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize("spelling", ["packed/../packed", "packed/.", "packed/additional/../../packed"])
def test_a_roundabout_name_is_the_folder(model: Path, folder: Path, spelling: str) -> None:
    inode = folder.stat().st_ino
    convert(model, Path(f"{folder.parent}/{spelling}"), force=True)
    assert names(folder.parent) == ["packed"] and folder.stat().st_ino != inode
    assert open_checkpoint(folder).packed is not None


def test_the_old_folder_is_back_when_it_cannot_be_replaced(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Any:
        if self.suffix == ".partial":
            raise PermissionError(13, "Permission denied")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(ConfigError, match="Permission denied"):
        convert(model, folder, force=True)
    assert names(folder.parent) == ["packed"]
    assert open_checkpoint(folder).packed is not None


@pytest.mark.parametrize("name", ["notes.txt", "sub/data", "packed.bin.bak"])
@pytest.mark.parametrize("damaged", [False, True])
def test_files_of_others_are_never_deleted(model: Path, folder: Path, name: str, damaged: bool) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("precious")
    if damaged:
        (folder / MANIFEST).write_text("{")
    with pytest.raises(ConfigError, match="holds other files beside a converted model") as caught:
        convert(model, folder, force=True)
    assert name in caught.value.message
    assert (folder / name).read_text() == "precious"
    (folder / name).unlink()
    convert(model, folder, force=True)
    assert open_checkpoint(folder).packed is not None


def test_files_that_come_while_it_runs_are_kept(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = folders._locked

    def add(directory: Path) -> Any:
        (folder / "late.txt").write_text("precious")
        return take(directory)

    monkeypatch.setattr(folders, "_locked", add)
    with pytest.raises(ConfigError, match=r"late\.txt"):
        convert(model, folder, force=True)
    assert (folder / "late.txt").read_text() == "precious"
    assert names(folder.parent) == ["packed"]


def test_the_current_folder_is_not_replaced(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    for name in (".", "..", str(folder)):
        with pytest.raises(ConfigError, match="is the current folder or above it"):
            convert(model, Path(name), force=True)
    assert open_checkpoint(folder).packed is not None


def test_a_link_is_not_replaced(model: Path, folder: Path) -> None:
    link = folder.parent / "link"
    for target in (folder, folder.parent / "nothing"):
        link.symlink_to(target)
        with pytest.raises(ConfigError, match=f"is a link to {target}; name the folder itself"):
            convert(model, link, force=True)
        assert link.is_symlink() and names(folder.parent) == ["link", "packed"]
        link.unlink()


def start(model: Path, folder: Path) -> subprocess.Popen[bytes]:
    """A conversion that waits for ever when it has begun to write."""
    code = (
        "import signal, sys, time\n"
        # In a background job, say, these would be ignored, and then convert goes on as it should.
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from lmdeploy.cli.main import main\n"
        "from lmdeploy.turbomind import packed\n"
        "def wait(model, directory, progress):\n"
        "    (directory / 'packed.bin').write_text('some')\n"
        "    time.sleep(60)\n"
        "packed.write_weights = wait\n"
        "sys.exit(main(['convert', *sys.argv[1:]]))\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(model), str(folder)], stderr=subprocess.DEVNULL)
    give_up = time.monotonic() + 60
    while not list(folder.parent.glob(".*.partial/packed.bin")):
        assert child.poll() is None and time.monotonic() < give_up
        time.sleep(0.02)
    return child


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_nothing_is_left_when_it_is_stopped(model: Path, tmp_path: Path, number: int) -> None:
    place = tmp_path / "place"
    place.mkdir()
    child = start(model, place / "packed")
    child.send_signal(number)
    assert child.wait(30) == (130 if number == signal.SIGINT else 128 + number)
    assert names(place) == []


def test_what_a_killed_process_left_is_removed_and_what_runs_is_not(model: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    killed = start(model, place / "packed")
    killed.kill()
    killed.wait(30)
    (left,) = names(place)
    (place / ".packed-2.x.partial").mkdir()  # of another target
    convert(model, place / "packed")
    assert left not in names(place) and names(place) == [".packed-2.x.partial", "packed"]
    other = start(model, place / "other")
    convert(model, place / "other")
    assert len(list(place.glob(".other.*.partial"))) == 1  # alive
    other.terminate()
    assert other.wait(30) == 128 + signal.SIGTERM
    assert names(place) == [".packed-2.x.partial", "other", "packed"]


def test_the_old_folder_comes_back_after_a_kill_between_two_renames(model: Path, folder: Path) -> None:
    folder.rename(folder.parent / ".packed.abc.old")
    with pytest.raises(RuntimeError, match="stop"), folders.in_one_go(folder, lambda: None):
        raise RuntimeError("stop")
    assert names(folder.parent) == ["packed"]
    assert open_checkpoint(folder).packed is not None


def refused(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        open_checkpoint(folder)
    assert "lmdeploy convert" in caught.value.message and "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_missing_or_other_text_file_is_refused(folder: Path, name: str) -> None:
    path, data = folder / name, (folder / name).read_bytes()
    path.unlink()
    assert f"{path}: is missing" in refused(folder)
    path.write_bytes(data.replace(b"0", b"1").replace(b"a", b"b"))  # of the same size
    assert path.stat().st_size == len(data) and f"{path}: is not the file" in refused(folder)
    path.write_bytes(data + b" ")
    assert f"{path}: is not the file" in refused(folder)
    path.write_bytes(data)
    open_checkpoint(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
def test_a_changed_text_file_of_the_source_is_noticed(model: Path, folder: Path, name: str) -> None:
    (model / name).write_bytes((model / name).read_bytes() + b" ")
    message = refused(folder)
    assert f"{model / name} has changed" in message
    assert f"lmdeploy convert {model} {folder} --force" in message


def test_a_damaged_description_names_the_remedy(folder: Path) -> None:
    for text in ("", "[]", '{"sha256": "0"', json.dumps({"packed": {}})):
        (folder / MANIFEST).write_text(text)
        refused(folder)


def test_an_empty_name_and_a_place_without_files(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(model), ""]) == 2
    assert "the folder to write is missing" in capsys.readouterr().err
    if os.path.isdir("/proc/self"):
        assert main(["convert", str(model), "/proc/packed"]) == 2
        assert "/proc is no place for files" in capsys.readouterr().err
