"""`lmdeploy chat [MODEL]`: talk to a model in the terminal, pipe prompts through it, or ask it one question.

Answers go to standard output. Everything else goes to the terminal, or to standard error when standard output
is no terminal, so that answers can be piped on.
"""

from __future__ import annotations

import argparse
import io
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from lmdeploy.cli.flags import (
    add_engine_flags,
    add_flags,
    add_speculative_flags,
    engine_config,
    speculative_args,
)
from lmdeploy.config import EngineConfig, GenerationConfig
from lmdeploy.errors import UserError, check_text

if TYPE_CHECKING:
    from lmdeploy.cli.conversation import Conversation
    from lmdeploy.pipeline import Pipeline

MAX_NEW_TOKENS = 4096
_SAMPLING = (
    "do_sample",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "random_seed",
    "stop_words",
    "ignore_eos",
)
HELP = """\
/help           this list
/clear          forget the conversation (the system text stays)
/system TEXT    set the system text and start anew; without TEXT: remove it
/stats          time and tokens of the newest answer, and the state of the cache
/exit           leave (also Ctrl-D)
Ctrl-C stops an answer; what was written of it stays in the conversation."""
_ROOM = "\nchat       takes room for one sequence, its conversation; --max-batch-size takes more"
_WORDS = {"exit": "/exit", "quit": "/exit", "end": "/clear"}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description="Talk to a model. Piped input is read line by line, one prompt a line; answers alone go "
        "to standard output. Answers are sampled when --do-sample, --temperature, --top-p, --top-k or "
        "--min-p is given. --max-batch-size is 1 unless given.",
    )
    add = parser.add_argument
    add(
        "model_path",
        nargs="?",
        metavar="MODEL",
        help="directory, GGUF file or hub id; default: the demo model",
    )
    add("--prompt", metavar="TEXT", help="answer this one prompt, print the timing and leave")
    add("--system", metavar="TEXT", help="system text of the conversation")
    add("--chat-template", metavar="FILE", help="chat template (Jinja or JSON) in place of the model's own")
    add("--log-level", default="WARNING", metavar="LEVEL", help="what is logged (default: WARNING)")
    add("--trust-remote-code", action="store_true", help="no effect: code of a model is never run")
    add(
        "--max-new-tokens",
        type=int,
        default=MAX_NEW_TOKENS,
        metavar="N",
        help="most tokens of an answer (4096)",
    )
    add_flags(parser.add_argument_group("sampling"), GenerationConfig, only=_SAMPLING)
    engine = parser.add_argument_group("engine")
    add_engine_flags(engine)
    add_speculative_flags(engine)


def run(args: argparse.Namespace) -> int:
    from lmdeploy.cli.conversation import Conversation

    for name in ("prompt", "system"):
        check_text(getattr(args, name) or "", f"--{name}")
    sampling = {k: v for k, v in vars(args).items() if k in _SAMPLING}
    config = GenerationConfig(max_new_tokens=args.max_new_tokens, **sampling)
    # A conversation is one sequence: room for more would only be memory taken from others.
    engine = engine_config(args, max_batch_size=getattr(args, "max_batch_size", 1))
    _accept_any_bytes()
    pipe, plan = _load(args, engine)
    with pipe:
        conversation = Conversation(pipe, config, args.system)
        if args.prompt is not None:
            conversation.check(args.prompt)
        _note(plan)
        if args.prompt is not None:
            return _answer_once(conversation, args.prompt)
        return _interactive(conversation) if sys.stdin.isatty() else _piped(conversation)


def _accept_any_bytes() -> None:
    """Input that is no text becomes lone surrogates, which cost one turn its answer and not the program."""
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _load(args: argparse.Namespace, engine: EngineConfig) -> tuple[Pipeline, str]:
    """The pipeline, and the memory plan unless it was printed.

    Whoever watches one of the streams in a terminal sees the plan before the weights are read. A program that
    reads standard error finds there, when something is wrong, the reason alone: for it the plan comes when
    the first answer can begin.
    """
    from lmdeploy.logging import set_up
    from lmdeploy.models.hub import DEMO_MODEL
    from lmdeploy.pipeline import load
    from lmdeploy.runtime.resolve import plan_table, resolve

    set_up(args.log_level)
    model = DEMO_MODEL if args.model_path is None else args.model_path
    config = resolve(model, engine, speculative=speculative_args(args))
    plan = plan_table(config)
    if not hasattr(args, "max_batch_size"):
        plan += _ROOM
    if sys.stdout.isatty() or sys.stderr.isatty():
        _note(plan)
        plan = ""
    return load(config, args.chat_template), plan


def _note(text: str) -> None:
    """Everything that is no answer."""
    if text:
        print(text, file=sys.stdout if sys.stdout.isatty() else sys.stderr, flush=True)


def _answer_once(conversation: Conversation, prompt: str) -> int:
    _print_answer(conversation, prompt)
    assert conversation.timing is not None
    _note(conversation.timing.line())
    return 0


def _piped(conversation: Conversation) -> int:
    """Each line of standard input is a turn or a command; exit code 1 when a turn failed."""
    code = 0
    for line in sys.stdin:
        text = line.strip()
        if not text:
            continue
        command = _command(text)
        if command == "/exit":
            break
        if command is not None:
            _obey(conversation, command, text)
        elif not _try_answer(conversation, text):
            code = 1
    return code


def _interactive(conversation: Conversation) -> int:
    from prompt_toolkit import PromptSession

    _note("/help lists the commands, Ctrl-D leaves")
    prompts: PromptSession[str] = PromptSession(reserve_space_for_menu=0)
    while True:
        try:
            text = prompts.prompt("> ").strip()
        except KeyboardInterrupt:
            _note("Ctrl-D or /exit leaves")
            continue
        except EOFError:
            return 0
        command = _WORDS.get(text) or _command(text)
        if command == "/exit":
            return 0
        if command is not None:
            _obey(conversation, command, text)
        elif text:
            with _interrupts(conversation):
                _try_answer(conversation, text)


def _command(text: str) -> str | None:
    """The command of a line, if it is one: a path such as /etc/hosts is not."""
    word = text.split(maxsplit=1)[0] if text else ""
    return word if re.fullmatch(r"/[a-z]+", word) else None


def _obey(conversation: Conversation, command: str, text: str) -> None:
    rest = text[len(command) :].strip()
    if command == "/help":
        _note(HELP)
    elif command == "/clear":
        conversation.clear()
        _note("(a new conversation)")
    elif command == "/system":
        _note(_set_system(conversation, rest))
    elif command == "/stats":
        _note(conversation.stats())
    else:
        _note(f"{command} is no command\n{HELP}")


def _set_system(conversation: Conversation, text: str) -> str:
    """What to say of it."""
    try:
        check_text(text, "the system text")
    except UserError as error:
        return f"error: {error.message}"
    conversation.system = text or None
    conversation.clear()
    return "(a new conversation with this system text)" if text else "(a new conversation, no system text)"


def _try_answer(conversation: Conversation, prompt: str) -> bool:
    try:
        _print_answer(conversation, prompt)
    except UserError as error:
        _note(f"error: {error.message}")
        return False
    return True


def _print_answer(conversation: Conversation, prompt: str) -> None:
    for text in conversation.answer(prompt):
        print(text, end="", flush=True)
    print(flush=True)
    _note(conversation.remark())


@contextmanager
def _interrupts(conversation: Conversation) -> Iterator[None]:
    """Ctrl-C ends the answer at the next token.

    It raises nothing: an exception inside a step would leave the engine's books half written.
    """

    def stop(_number: int, _frame: FrameType | None) -> None:
        conversation.stop()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
