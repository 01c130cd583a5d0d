"""Writes the generated reference pages from the code; with --check only compares.

Command flags, configuration fields, environment variables and model families are documented
where they are defined; these pages show them.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["COLUMNS"] = "100"
REFERENCE = Path(__file__).resolve().parents[1] / "docs" / "reference"


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser and those of its commands, depth first."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            seen: set[int] = set()
            for child in action.choices.values():
                if id(child) not in seen:
                    seen.add(id(child))
                    yield from parsers(child)


def cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def command_line() -> str:
    from lmdeploy.cli.main import build_parser

    parts = ["# Command line", "", "Options may be spelled with `-` or `_`.", ""]
    for parser in parsers(build_parser()):
        rows = [a for a in parser._actions if a.help != argparse.SUPPRESS and a.dest != "help"]
        rows = [a for a in rows if not isinstance(a, argparse._SubParsersAction)]
        if not rows:
            continue
        parts += [
            f"## {parser.prog}",
            "",
            parser.description or "",
            "",
            "| option | default | meaning |",
            "|---|---|---|",
        ]
        for a in rows:
            name = ", ".join(f"`{o}`" for o in a.option_strings) or f"`{a.metavar or a.dest}`"
            default = "" if a.default in (None, argparse.SUPPRESS) else f"`{cell(a.default)}`"
            parts.append(f"| {name} | {default} | {cell(a.help or '')} |")
        parts.append("")
    return "\n".join(parts)


def fields(cls: Any) -> list[str]:
    rows = [
        f"## {cls.__name__}",
        "",
        (cls.__doc__ or "").strip(),
        "",
        "| field | default | meaning |",
        "|---|---|---|",
    ]
    for f in dataclasses.fields(cls):
        default = "required" if f.default is dataclasses.MISSING else f"`{f.default!r}`"
        rows.append(f"| `{f.name}` | {default} | {cell(f.metadata.get('help', ''))} |")
    return [*rows, ""]


def configuration() -> str:
    from lmdeploy import config
    from lmdeploy.speculative import SpeculativeConfig

    names = ("TurbomindEngineConfig", "PytorchEngineConfig", "GenerationConfig", "ChatTemplateConfig")
    parts = ["# Configuration", ""]
    for name in names:
        parts += fields(getattr(config, name))
    parts += fields(SpeculativeConfig)
    return "\n".join(parts)


def environment() -> str:
    from lmdeploy import env

    rows = ["# Environment variables", "", "| variable | meaning |", "|---|---|"]
    rows += [f"| `{v.name}` | {cell(v.help)} |" for v in env.VARIABLES]
    return "\n".join([*rows, ""])


def families() -> str:
    from lmdeploy.models import registry, rope

    rows = [
        "# Model families",
        "",
        "| family | models | architectures in config.json | GGUF architectures |",
        "|---|---|---|---|",
    ]
    for family in registry.FAMILIES:
        hf = ", ".join(f"`{a}`" for a in family.hf_architectures)
        hf += "".join(f", `{a}` (its language model)" for a in family.hf_text_parts)
        gguf = ", ".join(f"`{a}`" for a in family.gguf_architectures)
        rows.append(f"| {family.name} | {family.models} | {hf} | {gguf} |")
    rows += ["", "Rotary position embeddings: " + ", ".join(f"`{kind}`" for kind in rope.SUPPORTED) + "."]
    return "\n".join([*rows, ""])


PAGES = {
    "command-line.md": command_line,
    "configuration.md": configuration,
    "environment.md": environment,
    "families.md": families,
}


def main() -> int:
    check = "--check" in sys.argv[1:]
    stale = []
    for name, write in PAGES.items():
        path, text = REFERENCE / name, write().rstrip("\n") + "\n"
        if check:
            if not path.exists() or path.read_text() != text:
                stale.append(name)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    if stale:
        print(f"docs/reference is not up to date ({', '.join(stale)}): run `make docs`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
