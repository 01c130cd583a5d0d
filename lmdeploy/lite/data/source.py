"""What `--calib-dataset` says -> names and their shares. Opens no file; whether a path exists is asked of the
caller, since file names may hold the characters that separate parts."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass

from lmdeploy.errors import ConfigError, shorten

_WEIGHT = re.compile(
    r"(?P<name>.+):(?P<weight>[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|nan|[+-]?inf)", re.S | re.I
)


@dataclass(frozen=True, slots=True)
class Part:
    """A path or a known name. weight: its share of all windows; the shares of all parts sum to 1."""

    name: str
    weight: float


def path_exists(name: str) -> bool:
    """Also for a name with ~, and for one that no path can have."""
    return os.path.exists(os.path.expanduser(name))


def parse_source(text: str, exists: Callable[[str], bool] = path_exists) -> tuple[Part, ...]:
    """`a.jsonl:0.7,b.txt:0.3`; without a number a part counts as 1.

    The longest piece between commas that is an existing path is one part, so commas and colons in file names
    need no quoting. ConfigError for an empty part, a name given twice and a weight that is not above 0.
    """
    pieces, parts, i = text.split(","), list[Part](), 0
    while i < len(pieces):
        length = _existing_length(pieces[i:], exists)
        parts.append(_part(",".join(pieces[i : i + length]), text, exists))
        i += length
    names = [part.name for part in parts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"--calib-dataset {shorten(text)}: {twice[0]} is given twice; give it once.")
    total = sum(part.weight for part in parts)
    return tuple(Part(part.name, part.weight / total) for part in parts)


def _existing_length(pieces: list[str], exists: Callable[[str], bool]) -> int:
    """How many of the pieces, joined again, are a path that exists; 1 where none is."""
    for length in range(len(pieces), 1, -1):
        joined = ",".join(pieces[:length]).strip()
        if exists(joined) or exists(_split(joined)[0]):
            return length
    return 1


def _split(piece: str) -> tuple[str, str | None]:
    """Name and weight. `C:` of a Windows path is no name with a weight: what follows is no number."""
    match = _WEIGHT.fullmatch(piece)
    return (match["name"].strip(), match["weight"]) if match else (piece, None)


def _part(piece: str, text: str, exists: Callable[[str], bool]) -> Part:
    piece = piece.strip()
    name, weight = (piece, None) if piece and exists(piece) else _split(piece)
    if not name:
        raise ConfigError(
            f"--calib-dataset {shorten(text)}: a part between commas is empty; write NAME or NAME:WEIGHT,"
            " separated by commas."
        )
    value = 1.0 if weight is None else float(weight)
    if not 0 < value <= 1e9 or value < 1e-9:
        raise ConfigError(
            f"--calib-dataset {shorten(text)}: the weight {weight} of {shorten(name)} must be a number"
            " above 0 (at most 1e9)."
        )
    return Part(name, value)
