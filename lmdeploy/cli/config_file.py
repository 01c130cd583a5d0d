"""`--config FILE`: the flags of a command from a YAML file.

A key of the file is a flag without its dashes, `-` or `_` alike; what the command line says goes before what
the file says. Values are read by the flags themselves, so both mean the same and fail alike. Knows no flag.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
from argparse import SUPPRESS, Namespace
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmdeploy.errors import ConfigError, shorten

FLAG = "--config"


def accept_config(parser: argparse.ArgumentParser, positional: str, own: Sequence[str] = ()) -> None:
    """Make `parser` read the file that its flag --config names; `own` keys are left to the command.

    They are in the result as `config_own`, what was given at all as `config_given`, each with its origin, and
    the parser as `config_parser`. `positional` is the key of the positional argument, which may be left out
    on the command line.
    """
    plain = parser.parse_known_args

    def parse(args: Any = None, namespace: Any = None) -> tuple[Namespace, list[str]]:
        typed, rest = given(parser, plain, args)
        path = getattr(typed, "config", None)
        whole = read_yaml(Path(path)) if path is not None else {}
        taken = {key: whole.pop(key) for key in list(whole) if key.replace("-", "_") in own}
        words = words_of(parser, whole, positional, f"{path}: ")
        filed, _ = given(parser, plain, words, f"{path}: ")
        values = {a.dest: a.default for a in parser._actions if a.default is not SUPPRESS}
        values |= {**parser._defaults, **vars(filed), **vars(typed)}
        origin = dict.fromkeys(vars(filed), "file") | dict.fromkeys(vars(typed), "flag")
        result = namespace or Namespace()
        for name, value in values.items():
            setattr(result, name, value)
        result.config_own = {key.replace("-", "_"): value for key, value in taken.items()}
        result.config_given = origin
        result.config_parser = parser
        return result, rest

    parser.parse_known_args = parse  # type: ignore[method-assign,assignment]


def given(
    parser: argparse.ArgumentParser, parse: Callable[..., Any], words: Any, where: str = ""
) -> tuple[Namespace, list[str]]:
    """What `words` say and no default."""
    with _no_defaults(parser):
        try:
            found: tuple[Namespace, list[str]] = parse(words, Namespace())
        except ConfigError as error:
            raise ConfigError(where + error.message) from None
    return found


@contextlib.contextmanager
def _no_defaults(parser: argparse.ArgumentParser) -> Iterator[None]:
    kept = [(action, action.default) for action in parser._actions]
    defaults, parser._defaults = parser._defaults, {}
    try:
        for action, _ in kept:
            action.default = SUPPRESS
        yield
    finally:
        parser._defaults = defaults
        for action, default in kept:
            action.default = default


def words_of(
    parser: argparse.ArgumentParser, values: Mapping[str, Any], positional: str, where: str
) -> list[str]:
    """The command line that says the same. Raises ConfigError for keys that are no flags."""
    words, last = [], []
    for key, value in values.items():
        name = key.replace("_", "-")
        action = parser._option_string_actions.get("--" + name)
        if value is None:
            continue
        if name == positional:
            last = ["--", str(value)]
        elif action is None or name in ("config", "help"):
            raise ConfigError(f"{where}there is no setting {shorten(key)}{_nearest(parser, name)}")
        else:
            words += _words(action, "--" + name, value, f"{where}{key}: ")
    return words + last


def _words(action: argparse.Action, flag: str, value: Any, where: str) -> list[str]:
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(f"{where}must be true or false, got {shorten(value)}")
        if not value and isinstance(action, argparse.BooleanOptionalAction):
            return [flag.replace("--", "--no-", 1)]
        return [flag] if value else []
    if isinstance(value, dict):
        return [f"{flag}={json.dumps(value)}"]
    if isinstance(action, argparse._AppendAction):
        return [f"{flag}={_text(one, where)}" for one in (value if isinstance(value, list) else [value])]
    if action.nargs in ("+", "*"):
        return [flag, *(_text(one, where) for one in (value if isinstance(value, list) else [value]))]
    return [f"{flag}={_text(value, where)}"]


def _text(value: Any, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"{where}must be a text or a number, got {shorten(value)}")
    return str(value)


def _nearest(parser: argparse.ArgumentParser, name: str) -> str:
    known = [option.removeprefix("--") for option in parser._option_string_actions]
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]!r}?" if close else "; each key is a flag without its dashes"


def read_yaml(path: Path) -> dict[str, Any]:
    """A file that holds one mapping. Raises ConfigError with the line at fault."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc,unused-ignore]
        """Refuses keys that come twice."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            for key, _ in node.value:
                if key.value in seen:
                    raise yaml.MarkedYAMLError(None, None, f"{key.value!r} comes twice", key.start_mark)
                seen.add(key.value)
            return super().construct_mapping(node, deep)

    shown = shorten(str(path))
    try:
        values = yaml.load(path.read_text(encoding="utf-8-sig"), Loader)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"{FLAG} {shown} cannot be read: {reason}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{FLAG} {shown}{line}: {getattr(error, 'problem', None) or 'not YAML'}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{FLAG} {shown} must hold settings, `name: value`")
    return values


def settings_of(
    parser: argparse.ArgumentParser, args: Namespace, positional: str, only: Collection[str] | None = None
) -> dict[str, Any]:
    """Every setting that has a value, by the key it has in a file; API keys are left out unless hashed.

    only: of these, by the name they have in `args`.
    """
    values: dict[str, Any] = {}
    seen = set[str]()
    for action in parser._actions:
        value = getattr(args, action.dest, None)
        if only is not None and action.dest not in only:
            continue
        if action.help == SUPPRESS and action.dest not in args.config_given:
            continue
        if action.dest in (*seen, "help", "config", "print_config") or value in (None, SUPPRESS, []):
            continue
        seen.add(action.dest)
        if not action.option_strings:
            values[positional] = value
        else:
            values[action.option_strings[0].removeprefix("--")] = value
    keys = [key for key in values.pop("api-keys", ()) if key.startswith(("@", "sha256:"))]
    return {**values, "api-keys": keys} if keys else values


def yaml_text(values: Mapping[str, Any]) -> str:
    import yaml

    text: str = yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)
    return text
