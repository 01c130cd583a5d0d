"""Puts generated text between the marks of a Markdown page."""

from __future__ import annotations

from pathlib import Path


def write_between(page: Path, begin: str, end: str, text: str) -> None:
    """Replaces what stands between the marks. ValueError without marks."""
    before, mark, rest = page.read_text().partition(begin)
    _, closing, after = rest.partition(end)
    if not mark or not closing:
        raise ValueError(f"{page} has no place for results: {begin} ... {end}")
    partial = page.with_name(page.name + ".partial")
    partial.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")
    partial.replace(page)
