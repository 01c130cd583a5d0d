"""Prints what the unit tier needs, one requirement a line: base dependencies and the test tools it uses.

Runs in the development environment, where the package is installed; the list is that of its metadata.
"""

from __future__ import annotations

import re
from importlib.metadata import requires

UNIT_TIER = {"pytest", "pytest-timeout", "pytest-asyncio", "hypothesis", "gguf", "httpx", "transformers"}


def main() -> None:
    for requirement in requires("lmdeploy") or []:
        text, _, marker = requirement.partition(";")
        name = re.split(r"[<>=! \[]", text, maxsplit=1)[0]
        if "extra" not in marker:
            print(requirement)
        elif name in UNIT_TIER:
            print(text)


if __name__ == "__main__":
    main()
