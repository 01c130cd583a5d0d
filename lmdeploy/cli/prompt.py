"""`lmdeploy prompt MODEL --messages FILE`: what a model sees of a conversation, and how others see it.

Owns its flags and what is printed. The prompt is made as the server makes it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmdeploy.errors import ConfigError, shorten

_AROUND = 4  # tokens shown before a difference, and characters times 10
_AFTER = 3


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser of `lmdeploy`."""
    parser = subparsers.add_parser(
        "prompt",
        help="show the prompt a model gets for messages, token by token",
        description="Show what a model sees: the rendered chat template and its tokens. With --against,"
        " compare with what a server, transformers or another model makes of the same messages;"
        " the first difference is marked, and the exit code is 1 where there is one.",
    )
    add = parser.add_argument
    add("model_path", metavar="MODEL", help="directory, GGUF file or hub id; its weights are not read")
    add(
        "--messages", metavar="FILE", help="JSON: a list of messages or a whole request; - for standard input"
    )
    add("--tools", metavar="FILE", help="JSON: a list of tools")
    add("--text", help="a plain text in place of messages")
    add("--chat-template", metavar="FILE", help="chat template (Jinja or JSON) in place of the model's own")
    add("--chat-template-kwargs", metavar="JSON", help="variables for the template, as a JSON object")
    add(
        "--no-generation-prompt",
        dest="add_generation_prompt",
        action="store_false",
        help="without the beginning of the answer",
    )
    add(
        "--against",
        metavar="WHAT",
        help="compare with a server (http://...), with `transformers`, or with another model",
    )
    add("--api-key", metavar="KEY", help="key for the server to compare with")
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the prompt, or the comparison. Returns 1 where there is a difference."""
    from lmdeploy.cli.prompt_sources import Conversation, against, own

    if (args.messages is None) == (args.text is None):
        raise ConfigError("give either --messages FILE or --text TEXT")
    if args.text is not None and args.tools is not None:
        raise ConfigError("--tools needs --messages")
    talk = Conversation(*_request(args), args.text, args.add_generation_prompt, _kwargs(args))
    ours = own(args.model_path, talk, args.chat_template)
    theirs = None if args.against is None else against(args.against, args.model_path, talk, args.api_key)
    if args.json:
        return _print_json(ours, theirs)
    if theirs is not None:
        return _print_difference(ours, theirs)
    _print_prompt(ours)
    return 0


def _request(args: argparse.Namespace) -> tuple[list[Any] | None, list[Any] | None]:
    """(messages, tools) of the files."""
    messages = None if args.messages is None else _read(args.messages)
    tools = None if args.tools is None else _read(args.tools)
    if isinstance(messages, dict):
        tools = messages.get("tools") if tools is None else tools
        messages = messages.get("messages")
        if messages is None:
            raise ConfigError(f"{args.messages}: the JSON object has no 'messages'")
    if tools is not None and not isinstance(tools, list):
        raise ConfigError(f"the tools must be a list, got {shorten(tools)}")
    return messages, tools


def _kwargs(args: argparse.Namespace) -> dict[str, Any]:
    if args.chat_template_kwargs is None:
        return {}
    value = _parse(args.chat_template_kwargs, "--chat-template-kwargs")
    if not isinstance(value, dict):
        raise ConfigError(f"--chat-template-kwargs must be a JSON object, got {shorten(value)}")
    return value


def _read(name: str) -> Any:
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return _parse(text, name)


def _parse(text: str, source: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not JSON: {error}") from None


def _print_prompt(ours: Any) -> None:
    print(ours.text, end="" if ours.text.endswith("\n") else "\n")
    print(f"--- {ours.source}: {len(ours.tokens)} tokens, {len(ours.text)} characters")
    for token in ours.tokens:
        print(f"{token.index:>6} {token.id:>8}  {token.shown()}")


def _print_json(ours: Any, theirs: Any) -> int:
    from lmdeploy.runtime.prompt_view import first_difference

    out: dict[str, Any] = {"prompt": ours.fields()}
    at = None
    if theirs is not None:
        at = first_difference(*_comparable(ours, theirs))
        out |= {"against": theirs.fields(), "first_difference": at}
    print(json.dumps(out, ensure_ascii=False))
    return 0 if at is None else 1


def _comparable(ours: Any, theirs: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """Ids where both sides have them, else texts."""
    if theirs.tokens is None:
        return ours.text, theirs.text
    return [t.id for t in ours.tokens], [t.id for t in theirs.tokens]


def _print_difference(ours: Any, theirs: Any) -> int:
    from lmdeploy.runtime.prompt_view import first_difference

    at = first_difference(*_comparable(ours, theirs))
    what = "tokens" if theirs.tokens is not None else "characters"
    if at is None:
        count = len(ours.tokens) if theirs.tokens is not None else len(ours.text)
        print(f"equal: {count} {what}, {ours.source} and {theirs.source}")
        return 0
    print(f"first difference at number {at} of the {what} (from 0)")
    print(f"  ours:   {ours.source}")
    print(f"  theirs: {theirs.source}")
    if theirs.tokens is None:
        begin = max(0, at - 10 * _AROUND)
        for name, text in (("ours", ours.text), ("theirs", theirs.text)):
            print(f"> {name + ':':<8}{text[begin:at]!r} then {text[at : at + 10 * _AFTER]!r}")
        return 1
    for index in range(max(0, at - _AROUND), at + _AFTER + 1):
        left, right = _cell(ours.tokens, index), _cell(theirs.tokens, index)
        if left or right:
            print(f"{'>' if index == at else ' '} {index:>5}  {left:<38}  {right}".rstrip())
    return 1


def _cell(tokens: Sequence[Any], index: int) -> str:
    if index >= len(tokens):
        return "" if index > len(tokens) else "(end)"
    return f"{tokens[index].id:>7} {tokens[index].shown()}"
