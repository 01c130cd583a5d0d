"""The built-in texts: English, Chinese, code and arithmetic, each a part for calibration and a held-out one.

English prose, Chinese and the held-out code are in texts.json.gz beside this file (sources and licences:
README.md there). Calibration code and the technical English come from the standard library of the running
Python, so they differ a little between versions: the hash of what was used is part of every description.
"""

from __future__ import annotations

import functools
import gzip
import importlib
import itertools
import json
import sysconfig
import tokenize
from collections.abc import Callable
from pathlib import Path

from lmdeploy.errors import ConfigError
from lmdeploy.lite.data.arithmetic import items
from lmdeploy.lite.data.records import Document

DOMAINS = ("english", "chinese", "code", "arithmetic")
NAME = "builtin"
SHARES = {"english": 0.45, "chinese": 0.2, "code": 0.25, "arithmetic": 0.1}
_TEXTS = Path(__file__).with_name("texts.json.gz")
_MODERN = Path(__file__).with_name("modern_chinese.txt")
_MODULES = (  # noqa: SIM905 - in the standard library of every supported version
    """
    argparse.py ast.py asyncio/base_events.py asyncio/queues.py base64.py bisect.py bz2.py
    calendar.py cmd.py collections/__init__.py configparser.py contextlib.py copy.py csv.py
    dataclasses.py difflib.py email/message.py enum.py fnmatch.py fractions.py functools.py
    graphlib.py gzip.py heapq.py html/parser.py http/client.py http/cookies.py inspect.py
    ipaddress.py json/decoder.py json/encoder.py logging/handlers.py numbers.py optparse.py
    pathlib.py pprint.py queue.py random.py sched.py shelve.py shlex.py shutil.py socketserver.py
    sqlite3/dump.py statistics.py string.py subprocess.py tarfile.py tempfile.py textwrap.py
    threading.py timeit.py trace.py types.py typing.py unittest/case.py unittest/mock.py
    urllib/parse.py uuid.py wave.py weakref.py xml/dom/minidom.py zipapp.py
    """
).split()
_ARITHMETIC_SEED = 20240229
_ITEMS = 8  # of one conversation or text
_CALIBRATION_TEXTS, _HELD_OUT_TEXTS = 1200, 60


def held_out(domain: str) -> list[str]:
    """Texts that calibration never uses, the same on every machine. ConfigError for no one of `DOMAINS`."""
    if domain not in DOMAINS:
        raise ConfigError(f"{domain}: not one of the domains {', '.join(DOMAINS)}.")
    if domain != "arithmetic":
        return list(_texts()[domain]["held_out"])
    stream = items(_ARITHMETIC_SEED + 1, held_out=True)
    return [_as_text(list(itertools.islice(stream, _ITEMS))) for _ in range(_HELD_OUT_TEXTS)]


def calibration(domain: str) -> list[Document]:
    """The other part. Arithmetic comes as conversations, so that models see their chat template in use."""
    if domain == "arithmetic":
        stream = items(_ARITHMETIC_SEED, held_out=False)
        return [_as_messages(list(itertools.islice(stream, 2))) for _ in range(_CALIBRATION_TEXTS)]
    more: dict[str, Callable[[], list[Document]]] = {
        "english": _topics,
        "chinese": _modern_chinese,
        "code": _standard_library,
    }
    return [*_texts()[domain]["calibration"], *more.get(domain, list)()]


@functools.cache
def _texts() -> dict[str, dict[str, list[str]]]:
    texts: dict[str, dict[str, list[str]]] = json.loads(gzip.decompress(_TEXTS.read_bytes()))
    return texts


def _modern_chinese() -> list[Document]:
    """Prose of today, which no text of the other file is."""
    return [*_MODERN.read_text("utf-8").split("\n\n")]


def _topics() -> list[Document]:
    """The language reference that `help()` shows; nothing where an installation leaves it out."""
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        return []
    return [topics[name] for name in sorted(topics) if len(topics[name]) > 400]


def _standard_library() -> list[Document]:
    folder, out = Path(sysconfig.get_path("stdlib")), list[Document]()
    for name in _MODULES:
        try:
            with tokenize.open(folder / name) as file:
                out.append(file.read())
        except (OSError, SyntaxError):  # an installation without sources, or without this module
            continue
    return out


def _as_text(problems: list[tuple[str, str]]) -> str:
    return "\n\n".join(f"{question}\n{answer}" for question, answer in problems) + "\n"


def _as_messages(problems: list[tuple[str, str]]) -> Document:
    return [
        {"role": role, "content": text}
        for problem in problems
        for role, text in zip(("user", "assistant"), problem, strict=True)
    ]
