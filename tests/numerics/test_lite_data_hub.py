"""Known data sets in the hub cache, in every layout they come in, and Parquet files. Needs pyarrow."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from byte_model import CHATML, make_tokenizer

from lmdeploy.errors import ConfigError
from lmdeploy.lite.data import CalibrationSet, calibration_windows
from lmdeploy.lite.data.files import Notes, read
from lmdeploy.lite.data.known import SETS
from lmdeploy.text.chat_template import ChatTemplate

Rows = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def write(path: Path, rows: Rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines))
    elif path.suffix == ".zst":
        with pyarrow.output_stream(str(path), compression="zstd") as stream:
            stream.write(lines)
    elif path.suffix == ".txt":
        path.write_text("\n".join(str(row["text"]) for row in rows))
    else:
        path.write_bytes(lines)


def snapshot(cache: Path, repo: str, revision: str = "main", commit: str = "c0ffee") -> Path:
    """An empty snapshot of a data set, as huggingface_hub lays it out."""
    folder = cache / f"datasets--{repo.replace('/', '--')}"
    ref = folder / "refs" / revision
    ref.parent.mkdir(parents=True, exist_ok=True)
    ref.write_text(commit)
    (folder / "snapshots" / commit).mkdir(parents=True, exist_ok=True)
    return folder / "snapshots" / commit


def windows(source: str, cache: Path, samples: int = 4) -> CalibrationSet:
    tokenizer = make_tokenizer()
    template = ChatTemplate({"default": CHATML}, tokenizer, "byte model")
    return calibration_windows(source, tokenizer, template, samples, 32, download_dir=str(cache))


def seen(found: CalibrationSet) -> str:
    tokenizer = make_tokenizer()
    return "".join(tokenizer.decode([int(i) for i in row], False) for row in found.ids)


TEXT: Rows = [{"text": "the right text " * 9} for _ in range(20)]
ASKED: Rows = [{"question": "the right text?", "answer": "the right text " * 9} for _ in range(20)]
# name -> file as the repository has it (the first in the cache's own main branch), and its rows
LAYOUTS = {
    "wikitext2": ("wikitext-2-raw-v1/train-00000-of-00001.parquet", TEXT),
    "c4": ("en/c4-train.00000-of-01024.json.gz", TEXT),
    "pileval": ("val.jsonl.zst", TEXT),
    "gsm8k": ("main/train-00000-of-00001.parquet", ASKED),
    "neuralmagic_calibration": ("LLM/train-00000-of-00001.parquet", TEXT),
    "open-platypus": ("data/train-00000-of-00001-4fe2df04669d1669.parquet", ASKED),
    "openwebtext": ("plain_text/train-00000-of-00080.parquet", TEXT),
    "ptb": ("penn_treebank/train/0000.parquet", [{"sentence": row["text"]} for row in TEXT]),
}


def test_every_known_set_has_a_stand_in() -> None:
    assert LAYOUTS.keys() == SETS.keys()


@pytest.mark.parametrize("name", SETS)
def test_a_known_set_is_read_as_its_repository_has_it(name: str, tmp_path: Path) -> None:
    file, rows = LAYOUTS[name]
    root = snapshot(tmp_path, SETS[name].repos[0], SETS[name].revision or "main")
    write(root / file, rows)
    wrong: Rows = [{"text": "the wrong text " * 9}]
    (root / "README.md").write_text("the wrong text " * 100)
    (root / "dataset_infos.json").write_text(json.dumps({"text": "the wrong text"}))
    write(root / "other/test-00000-of-00001.parquet", wrong)
    write(root / "test.jsonl", wrong)
    found = windows(name, tmp_path)
    assert found.ids.shape == (4, 32) and "right text" in seen(found) and "wrong" not in seen(found)
    assert found.description["parts"][0]["name"] == name and not found.warnings


@pytest.mark.parametrize(
    "file", ["data/train-00000-of-00001.parquet", "train.jsonl", "wiki.train.txt", "text.jsonl"]
)
@pytest.mark.parametrize("repo", SETS["wikitext2"].repos)
def test_other_layouts(file: str, repo: str, tmp_path: Path) -> None:
    root = snapshot(tmp_path, repo)
    write(root / file, TEXT)
    if "train" in file:
        write(root / file.replace("train", "test"), [{"text": "the wrong text " * 9}])
    assert "wrong" not in seen(windows("wikitext2", tmp_path))


def test_files_that_are_links_into_blobs(tmp_path: Path) -> None:
    root = snapshot(tmp_path, "Salesforce/wikitext")
    blob = root.parents[1] / "blobs/0123"
    write(blob.with_suffix(".jsonl"), TEXT)
    blob.with_suffix(".jsonl").rename(blob)
    (root / "train.jsonl").symlink_to("../../blobs/0123")
    assert windows("wikitext2", tmp_path).ids.shape == (4, 32)


def test_the_snapshot_of_main_is_preferred(tmp_path: Path) -> None:
    write(snapshot(tmp_path, "Salesforce/wikitext", "old", "aaa") / "train.jsonl", [{"text": "old " * 99}])
    write(snapshot(tmp_path, "Salesforce/wikitext", "main", "bbb") / "train.jsonl", TEXT)
    assert "right" in seen(windows("wikitext2", tmp_path))


def test_names_and_files_mix_with_weights(tmp_path: Path) -> None:
    write(snapshot(tmp_path, "Salesforce/wikitext") / "train.jsonl", TEXT)
    write(tmp_path / "own.parquet", [{"text": "my own words " * 9} for _ in range(20)])
    found = windows(f"wikitext2:0.75,{tmp_path / 'own.parquet'}:0.25,builtin-code:1", tmp_path, samples=8)
    assert [part["windows"] for part in found.description["parts"]] == [3, 1, 4]


@pytest.mark.parametrize("name", SETS)
def test_offline_and_not_there(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        windows(name, tmp_path)
    message = error.value.message
    folder = tmp_path / f"datasets--{SETS[name].repos[0].replace('/', '--')}"
    assert len(message.splitlines()) == 1 and str(folder) in message
    assert name in message and "HF_HUB_OFFLINE is set" in message and ".jsonl" in message


def test_a_set_without_the_expected_field(tmp_path: Path) -> None:
    root = snapshot(tmp_path, "Salesforce/wikitext")
    write(root / "data/train-00000-of-00001.parquet", [{"title": "x", "label": 1}])
    with pytest.raises(ConfigError, match="its records have: label, title"):
        windows("wikitext2", tmp_path)


def test_a_set_with_no_data_file(tmp_path: Path) -> None:
    (snapshot(tmp_path, "Salesforce/wikitext") / "wikitext.py").write_text("print()")
    with pytest.raises(ConfigError, match=r"wikitext2"):
        windows("wikitext2", tmp_path)


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    write(path, [{"id": 1, "messages": chat}, {"id": 2, "messages": chat}])
    notes = Notes()
    assert read(path, 1 << 20, notes) == [chat, chat]
    write(path, [{"text": "one", "url": "u"}, {"text": None, "url": "u"}])
    assert read(path, 1 << 20, notes) == ["one"]
    assert notes.warnings("a") == ["a: 1 records with empty text were skipped"]
    for content in (b"", b"PAR1", b"no parquet at all"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="not a readable Parquet file") as error:
            read(path, 1 << 20, Notes())
        assert "\n" not in error.value.message


def test_without_pyarrow_the_extra_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", TEXT)
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from pathlib import Path\n"
        "from lmdeploy.errors import ConfigError\n"
        "from lmdeploy.lite.data.files import Notes, read\n"
        "try: read(Path(sys.argv[1]), 1000, Notes())\n"
        "except ConfigError as error: print(error.message)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.parquet")], capture_output=True, text=True, check=True
    )
    assert "pip install lmdeploy[lite]" in done.stdout


def test_a_download_asks_for_the_wanted_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def download(repo: str, **options: Any) -> str:
        asked.update(repo=repo, **options)
        root = snapshot(tmp_path, repo, options["revision"] or "main")
        write(root / "penn_treebank/train/0000.parquet", TEXT)
        return str(root)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert windows("ptb", tmp_path).ids.shape == (4, 32)
    assert asked["repo"] == "ptb-text-only/ptb_text_only" and asked["repo_type"] == "dataset"
    assert asked["revision"] == "refs/convert/parquet" and asked["cache_dir"] == str(tmp_path)
    assert asked["allow_patterns"] == list(SETS["ptb"].wanted) and asked["ignore_patterns"] is None
    asked.clear()
    assert windows("ptb", tmp_path).ids.shape == (4, 32) and not asked  # from the cache, nobody asked
