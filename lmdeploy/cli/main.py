"""The command `lmdeploy`: finds the command, turns errors into one line and an exit code.

Builds the parsers without importing an engine; each command is a file with `add_parser(subparsers)` and
`run(args)`. Knows which commands and flags other versions had, and what stands in their place.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import itertools
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from lmdeploy import __version__
from lmdeploy.cli import chat, check_env, convert, lite, prompt, serve
from lmdeploy.cli.flags import normalise
from lmdeploy.errors import ConfigError, LMDeployError, shorten

_COMMANDS = {
    "chat": chat,
    "serve": serve,
    "convert": convert,
    "lite": lite,
    "prompt": prompt,
    "check_env": check_env,
    "check-env": check_env,
}

_CLIENT = "start `lmdeploy serve api_server MODEL` and use any OpenAI client, or `lmdeploy chat MODEL`"
_REMOVED_COMMANDS = {
    ("list",): "`lmdeploy check_env` lists the model families",
    ("serve", "gradio"): _CLIENT,
    ("serve", "api_client"): _CLIENT,
    ("serve", "triton_client"): _CLIENT,
    ("lite", "kv_qparams"): "the key/value cache needs no file: serve or chat with --quant-policy 8 or 4",
}

_TEMPLATE = "give the chat template as a JSON file with --chat-template"
_REMOVED_FLAGS = {
    "--meta-instruction": _TEMPLATE,
    "--cap": _TEMPLATE,
    "--tm-params": "each setting has its own flag; see --help",
    "--quant-path": "the key/value cache needs no file",
    "--qos-config-path": "limit the load with --max-concurrent-requests",
    "--disable-vision-encoder": "use --language-model-only",
    "--strategy": "use --routing-strategy",
}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, like every other error here."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Without this a help text that cannot be written would count as shown."""
        (file or sys.stderr).write(message)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; imports no engine."""
    parser = _Parser(prog="lmdeploy", description="Compress, run and serve large language models on CPUs.")
    parser.add_argument("-v", "--version", action="version", version=f"lmdeploy {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in dict.fromkeys(_COMMANDS.values()):
        module.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit code: the command's, that of an error's class, 130: Ctrl-C, 141: closed pipe."""
    _fill_closed_streams()
    try:
        return _flushed(normalise(list(sys.argv[1:] if argv is None else argv)))
    except LMDeployError as error:
        return _complain(error.message, error.exit_code)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _forget_output()
        return 141
    except OSError as error:
        _forget_output()
        closed = error.errno == errno.EBADF
        return _complain("standard output is closed" if closed else _system_words(error), 1)


def _system_words(error: OSError) -> str:
    """Without the number; with the name of a file where there is one."""
    what = error.strerror or str(error)
    return what if error.filename is None else f"{shorten(str(error.filename))}: {what}"


def _flushed(argv: list[str]) -> int:
    """Run; all that was printed, also a help text, has been written when this returns."""
    try:
        return _run(argv)
    finally:
        sys.stdout.flush()


def _fill_closed_streams() -> None:
    """Python has no stream where the shell closed one (`>&-`).

    Reading then finds the end, what would be an answer fails as on a full disk, messages are lost.
    """
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY))
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def _forget_output() -> None:
    """What cannot be written would be tried, and reported by the interpreter, once more at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: list[str]) -> int:
    _refuse_removed_command(argv)
    _refuse_removed_flag(argv)
    args, unknown = build_parser().parse_known_args(argv)
    if unknown:
        raise ConfigError(_unknown_text(unknown, argv))
    code: int = _COMMANDS[args.command].run(args)
    return code


def _complain(message: str, code: int) -> int:
    with contextlib.suppress(OSError):
        print("lmdeploy: error: " + " ".join(message.split()), file=sys.stderr, flush=True)
    return code


def _refuse_removed_command(argv: list[str]) -> None:
    words = [w for w in argv[:2] if not w.startswith("-")]
    for length in (2, 1):
        instead = _REMOVED_COMMANDS.get(tuple(words[:length]))
        if instead:
            raise ConfigError(f"`lmdeploy {' '.join(words[:length])}` does not exist: {instead}")
    if words[:1] == ["chat"] and words[1:] in (["turbomind"], ["torch"]) and argv[2:] and argv[2][:1] != "-":
        raise ConfigError(f"`lmdeploy chat {words[1]} MODEL` does not exist: write `lmdeploy chat MODEL`")
    if words and argv[0] == words[0] and words[0] not in _COMMANDS:
        commands = ", ".join(sorted(c for c in _COMMANDS if "-" not in c))
        raise ConfigError(f"unknown command `{words[0]}`; commands: {commands}")


def _refuse_removed_flag(argv: list[str]) -> None:
    """Before parsing: what is left of a name may be taken for the beginning of another flag."""
    for word in itertools.takewhile(lambda word: word != "--", argv):
        flag = word.partition("=")[0]
        if flag in _REMOVED_FLAGS:
            raise ConfigError(f"{flag} does not exist: {_REMOVED_FLAGS[flag]}")


def _unknown_text(unknown: list[str], argv: list[str]) -> str:
    flags = [word.split("=")[0] for word in unknown if word.startswith("-")]
    if not flags:
        return f"unexpected argument {unknown[0]!r}; `lmdeploy {argv[0]} --help` shows what there is"
    flag = flags[0]
    close = difflib.get_close_matches(flag, _known_flags(argv), n=1)
    hint = f"did you mean {close[0]}?" if close else f"`lmdeploy {argv[0]} --help` lists the options"
    return f"unknown option {flag}; {hint}"


def _known_flags(argv: list[str]) -> list[str]:
    """Options of the innermost command named in `argv`."""
    parser = build_parser()
    for word in argv:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction) and word in action.choices:
                parser = action.choices[word]
    return [name for action in parser._actions for name in action.option_strings]
