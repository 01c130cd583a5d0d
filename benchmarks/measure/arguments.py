"""Types of command-line arguments that all benchmarks share."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """A whole number of at least 1; argparse tells of anything else in one line."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)
