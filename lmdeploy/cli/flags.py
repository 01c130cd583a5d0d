"""Command-line flags made from the fields of a configuration class.

A field's declaration is its help, type and choices; nothing is said twice. Knows argparse and dataclasses, no
command.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from lmdeploy.config import EngineConfig, PytorchEngineConfig, TurbomindEngineConfig, is_fixed
from lmdeploy.errors import ConfigError
from lmdeploy.speculative import METHODS, SpeculativeConfig, speculative_options

Config = TypeVar("Config")
Flags = argparse.ArgumentParser | argparse._ArgumentGroup

ENGINES: dict[str, type[EngineConfig]] = {
    "turbomind": TurbomindEngineConfig,
    "pytorch": PytorchEngineConfig,
}
_UNITS = {"": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_TYPES = {int: "N", float: "X", str: "TEXT"}


def normalise(argv: list[str]) -> list[str]:
    """Option names with `-` for `_`, values untouched; what follows a lone `--` is left alone."""
    out: list[str] = []
    for index, word in enumerate(argv):
        if word == "--":
            return out + argv[index:]
        name, equals, value = word.partition("=")
        out.append(name.replace("_", "-") + equals + value if word.startswith("--") else word)
    return out


def flag_name(field: dataclasses.Field[Any]) -> str:
    """The flag of a field: `session_len` -> `--session-len`, unless it names its own."""
    flag: str = field.metadata.get("flag") or "--" + field.name.rstrip("_").replace("_", "-")
    return flag


def add_flags(parser: Flags, cls: type[Any], only: Collection[str] | None = None) -> None:
    """One flag for each field of `cls` that has an effect (of those in `only`, when given).

    Fields with a neutral value alone are accepted as hidden flags, so that a command written for a GPU gets
    the field's own answer instead of "unknown option".
    """
    for field in dataclasses.fields(cls):
        mapping = field.metadata.get("kind") == "bias"  # has no form on a command line
        if (only is None or field.name in only) and not mapping:
            parser.add_argument(flag_name(field), dest=field.name, **_options(field))


def add_engine_flags(group: Flags) -> None:
    """`--backend` and the flags of every engine, each once."""
    group.add_argument(
        "--backend",
        choices=tuple(ENGINES),
        help="the engine: turbomind (native, on the CPU) or pytorch (on a CUDA card or the CPU); default: "
        "the better fit, said at start",
    )
    added = set[str]()
    engines: list[type[EngineConfig]] = [EngineConfig, *ENGINES.values()]
    for cls in engines:
        names = {field.name for field in dataclasses.fields(cls)} - added
        add_flags(group, cls, names)
        added |= names


def add_speculative_flags(group: Flags) -> None:
    """Speculative decoding, in the spellings of other servers."""
    add = group.add_argument
    add(
        "--speculative-config",
        metavar="JSON",
        help="speculative decoding, as a JSON object of SpeculativeConfig",
    )
    add(
        "--speculative-algorithm",
        metavar="METHOD",
        help=f"the same by parts: method of SpeculativeConfig, {' or '.join(METHODS)}",
    )
    add("--speculative-draft-model", metavar="MODEL", help="the same by parts: the smaller model")
    add(
        "--speculative-num-draft-tokens",
        type=int,
        metavar="N",
        help="the same by parts: most guesses of a sequence in a step",
    )


def speculative_args(args: argparse.Namespace) -> SpeculativeConfig | None:
    """What the speculative flags say; None when none was given. Raises ConfigError."""
    parts = {
        "method": args.speculative_algorithm,
        "model": args.speculative_draft_model,
        "num_speculative_tokens": args.speculative_num_draft_tokens,
    }
    given = {name: value for name, value in parts.items() if value is not None}
    if not given:
        return speculative_options(args.speculative_config)
    if args.speculative_config is not None:
        raise ConfigError("--speculative-config says everything: give no other --speculative flag beside it")
    return speculative_options(given)


def engine_config(args: argparse.Namespace, **more: Any) -> EngineConfig:
    """The configuration of the engine that `--backend` names, or what all engines share when it names none.

    Flags of other engines are checked too: ConfigError for a value that would not be followed.
    """
    chosen = ENGINES[args.backend] if args.backend else EngineConfig
    config = from_args(chosen, args, **more)
    own = {field.name for field in dataclasses.fields(chosen)}
    for name, cls in ENGINES.items():
        for field in dataclasses.fields(cls):
            value = getattr(args, field.name, field.default)
            if field.name in own or value == field.default:
                continue
            given: dict[str, Any] = {field.name: value}
            cls(**given)
            if not is_fixed(field):
                hint = f"{flag_name(field)} belongs to the {name} engine: add --backend {name}"
                raise ConfigError(hint, param=field.name)
    return config


def from_args(cls: type[Config], args: argparse.Namespace, **more: Any) -> Config:
    """The configuration the flags describe; the rest keeps its default. Raises what `cls` raises."""
    names = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    given = {k: v for k, v in vars(args).items() if k in names and v is not argparse.SUPPRESS}
    return cls(**{**given, **more})


def _options(field: dataclasses.Field[Any]) -> dict[str, Any]:
    rules = field.metadata
    if is_fixed(field) and str(field.type).startswith(("Sequence", "Mapping")):
        return {"nargs": "+", "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    if is_fixed(field):
        return {"type": _literal, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS, **_bare(field)}
    shown = "" if field.default is None else f" (default: {field.default})"
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": rules["help"] + shown}
    if rules.get("kind") is bool:
        return {**options, "action": argparse.BooleanOptionalAction}
    if rules.get("kind") == "words":
        return {**options, "nargs": "+", "metavar": "TEXT"}
    if rules.get("kind") == "ids":
        return {**options, "nargs": "+", "type": int, "metavar": "ID"}
    if "choices" in rules:
        return {**options, **_choices(rules["choices"], rules.get("optional", False))}
    if rules.get("kind") is Mapping:
        return {**options, "type": _json_object, "metavar": "JSON"}
    return {**options, "type": rules["kind"], "metavar": _TYPES[rules["kind"]]}


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text[:80]!r}")
    return value


def _choices(values: tuple[Any, ...], optional: bool) -> dict[str, Any]:
    """`none` stands for no choice where that is one."""
    if not optional:
        return {"choices": values, "type": type(values[0])}

    def chosen(text: str) -> Any:
        value = _literal(text)
        if value is not None and value not in values:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(map(str, values))}")
        return value

    return {"type": chosen, "metavar": "{" + ",".join(map(str, values)) + "}"}


def _bare(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """`--empty-init` alone means True."""
    return {"nargs": "?", "const": True} if isinstance(field.default, bool) else {}


def _literal(text: str) -> Any:
    """A number, true or false where it looks like one, else the text."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def byte_count(text: str) -> int:
    """A size on the command line: bytes, or a number with kB, MB, GB (1000) or KiB, MiB, GiB (1024)."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(|kB|MB|GB|KiB|MiB|GiB)", text.strip())
    count = round(float(found[1]) * _UNITS[found[2]]) if found else 0
    if not 1 <= count < 2**63:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; write bytes, or a number with MB, MiB, GB or GiB"
        )
    return count
