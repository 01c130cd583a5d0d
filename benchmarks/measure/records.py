"""Results as they come: one JSON line for each turn, so that a run that was cut short goes on from there.

A turn is one measurement of one side in one row. Knows no engine.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Key = tuple[str, str, str]  # model, case, side


class Records:
    """The file and what it holds. A last line cut short by a crash is dropped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.all: list[Record] = []
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    self.all.append(json.loads(line))
                except json.JSONDecodeError:
                    break
            _write(path, self.all)

    def add(self, record: Mapping[str, Any]) -> None:
        self.all.append(dict(record))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def drop(self, unwanted: Callable[[Record], bool]) -> None:
        """As if those had never been measured."""
        self.all = [record for record in self.all if not unwanted(record)]
        _write(self.path, self.all)

    def turns(self) -> dict[Key, list[Record]]:
        """Turns that gave a figure, in order."""
        found: dict[Key, list[Record]] = defaultdict(list)
        for record in self.all:
            if record.get("kind") == "turn":
                found[record["model"], record["case"], record["side"]].append(record)
        return dict(found)

    def failures(self) -> dict[Key, str]:
        """The last error of each side and row that has no figure."""
        measured = self.turns()
        errors = {
            (r["model"], r["case"], r["side"]): r["error"] for r in self.all if r.get("kind") == "failure"
        }
        return {key: error for key, error in errors.items() if key not in measured}

    def of_kind(self, kind: str) -> list[Record]:
        return [record for record in self.all if record.get("kind") == kind]


def _write(path: Path, records: list[Record]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(json.dumps(record) + "\n" for record in records))
    partial.replace(path)
