"""Prints the base dependencies of the package and what the unit tier needs, one requirement a line."""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

UNIT_TIER = ("pytest", "pytest-timeout", "pytest-asyncio", "hypothesis", "gguf")


def main() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    dev = [r for r in project["optional-dependencies"]["dev"] if r.split(">")[0].split("=")[0] in UNIT_TIER]
    print("\n".join([*project["dependencies"], *dev]))


if __name__ == "__main__":
    main()
