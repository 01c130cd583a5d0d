"""Public vocabularies and templates, fetched by tools/fetch_test_data.py and kept in .cache/test-data.

Without them a test fails with the reason: it never passes by having nothing to compare.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

TOOL = Path(__file__).resolve().parents[2] / "tools" / "fetch_test_data.py"


def _tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fetch_test_data", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def vocabularies() -> Path:
    """Folder with ggml-vocab-*.gguf, .inp and .out, and templates/*.jinja."""
    folder: Path = _tool().vocabularies()
    return folder


def mistral_files() -> Path:
    """Folder with Mistral's SentencePiece models and tekken files."""
    folder: Path = _tool().mistral_files()
    return folder


def expected_ids(gguf: Path) -> list[tuple[str, list[int]]]:
    """(text, ids) as the vocabulary's own project expects them."""
    texts = Path(f"{gguf}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")[:-1]
    lines = Path(f"{gguf}.out").read_text(encoding="utf-8").split("\n")[:-1]
    return [(text, [int(i) for i in line.split()]) for text, line in zip(texts, lines, strict=True)]
