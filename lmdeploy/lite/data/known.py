"""Data sets by the names that users know: found in the hub cache, else downloaded.

A repository is looked at file by file, whatever its layout: Parquet shards under data/ or under the name of a
configuration, JSON lines, text. No scripts are run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lmdeploy.errors import ConfigError, ModelError
from lmdeploy.lite.data import files
from lmdeploy.lite.data.records import Document
from lmdeploy.models import hub

_OTHER_FILES = (
    "dataset_infos.json",
    "dataset_info.json",
    "dataset_dict.json",
    "state.json",
    "readme.md",
    "license.txt",
)


@dataclass(frozen=True, slots=True)
class KnownSet:
    """repos: where it is, the first for downloads, all for the cache. wanted: the files to download, also
    the right ones of several configurations in the cache. revision: where main holds a script and no data."""

    repos: tuple[str, ...]
    wanted: tuple[str, ...]
    revision: str | None = None


SETS = {
    "wikitext2": KnownSet(("Salesforce/wikitext", "wikitext"), ("wikitext-2-raw-v1/train-*",)),
    "c4": KnownSet(("allenai/c4", "c4"), ("en/c4-train.00000-of-01024.json.gz",)),
    "pileval": KnownSet(("mit-han-lab/pile-val-backup",), ("val.jsonl.zst",)),
    "gsm8k": KnownSet(("openai/gsm8k", "gsm8k"), ("main/train-*",)),
    "neuralmagic_calibration": KnownSet(
        ("neuralmagic/calibration", "RedHatAI/calibration"), ("LLM/train-*", "LLM/*.parquet", "LLM/*.jsonl")
    ),
    "open-platypus": KnownSet(("garage-bAInd/Open-Platypus",), ("data/train-*",)),
    "openwebtext": KnownSet(("Skylion007/openwebtext", "openwebtext"), ("plain_text/train-00000-of-*",)),
    "ptb": KnownSet(
        ("ptb-text-only/ptb_text_only", "ptb_text_only"),
        ("penn_treebank/train/*", "penn_treebank/*train*"),
        "refs/convert/parquet",
    ),
}


def read(name: str, room: int, notes: files.Notes, download_dir: str | None) -> list[Document]:
    """The documents of a known set. ConfigError of one line where neither cache nor hub has it."""
    chosen = SETS[name]
    found = _cached(chosen, download_dir)
    if not found:
        found = _choose(_download(name, chosen, download_dir), chosen)
    if not found:
        raise ConfigError(
            f"--calib-dataset {name}: {chosen.repos[0]} holds no file of a known kind"
            f" ({', '.join(files.KINDS)}); give a local file."
        )
    documents = files.read_files(found, room, notes)
    if not documents:
        raise ConfigError(files.nothing(found[0], notes))
    return documents


def _cached(chosen: KnownSet, download_dir: str | None) -> list[Path]:
    for repo in chosen.repos:
        for snapshot in hub.cached_snapshots(repo, "dataset", download_dir):
            found = _choose(snapshot, chosen)
            if found:
                return found
    return []


def _choose(snapshot: Path, chosen: KnownSet) -> list[Path]:
    """The wanted files; else those for training, for validation, or all there are."""
    every = [
        file
        for file in sorted(snapshot.rglob("*"))
        if files.is_data_file(file.name) and file.name.lower() not in _OTHER_FILES and file.is_file()
    ]
    names = {file: file.relative_to(snapshot).as_posix() for file in every}
    wanted = [file for file in every if any(Path(names[file]).match(pattern) for pattern in chosen.wanted)]
    for word in ("train", "val"):
        wanted = wanted or [file for file in every if word in names[file].lower()]
    return wanted or every


def _download(name: str, chosen: KnownSet, download_dir: str | None) -> Path:
    repo = chosen.repos[0]
    try:
        return hub.download(repo, chosen.revision, download_dir, kind="dataset", wanted=chosen.wanted)
    except ModelError as error:
        folder = hub.cache_folder(repo, "dataset", download_dir)
        raise ConfigError(
            f"--calib-dataset {name}: {error.message.rstrip('.')} (looked in {folder}); instead of the name,"
            " --calib-dataset takes a local file: .txt, .jsonl, .parquet or a folder of them."
        ) from None
