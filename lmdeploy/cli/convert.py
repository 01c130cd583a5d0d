"""`lmdeploy convert MODEL DIR`: pack a model's weights once, so that it starts faster.

Owns its flags and those of other versions' command of this name.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from lmdeploy.cli.flags import add_flags, from_args
from lmdeploy.cli.signals import ended_by_signals
from lmdeploy.config import TurbomindEngineConfig
from lmdeploy.errors import ConfigError, ModelError

_USED = ("model_format", "num_threads", "revision", "download_dir")
_ABSENT_FLAGS = {
    "tp": "packed weights serve any number of threads",
    "group_size": "the group size is that of the model's files",
    "tokenizer_path": "the tokenizer is copied from the model",
    "trust_remote_code": "no code of a model is run",
}


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser of `lmdeploy`."""
    parser = subparsers.add_parser(
        "convert",
        help="pack a model's weights once, so that it starts faster",
        description="Write a model in the native engine's packed form to a new folder, with its tokenizer,"
        " chat template and generation config. Every command takes the folder for a model.",
    )
    parser.add_argument("model_path", metavar="MODEL", help="directory, GGUF file or hub id")
    parser.add_argument("directory", metavar="DIR", nargs="?", help="folder to write; must be new")
    parser.add_argument("--force", action="store_true", help="replace a converted model in DIR")
    add_flags(parser, TurbomindEngineConfig, _USED)
    parser.add_argument("--dst-path", help=argparse.SUPPRESS)
    for name in _ABSENT_FLAGS:
        parser.add_argument(
            "--" + name.replace("_", "-"), nargs="*", default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )


def run(args: argparse.Namespace) -> int:
    """Convert and say so in one line."""
    _refuse_old_spelling(args)
    from lmdeploy.models.hub import resolve_model_path
    from lmdeploy.runtime.convert import convert
    from lmdeploy.runtime.memory_plan import size

    config = from_args(TurbomindEngineConfig, args)
    path = resolve_model_path(args.model_path, revision=config.revision, download_dir=config.download_dir)
    begin = time.monotonic()
    with ended_by_signals():
        done = convert(path, Path(args.directory).expanduser(), config, force=args.force)
    seconds = time.monotonic() - begin
    print(f"{args.directory}: {size(done.nbytes)} of packed weights, written in {seconds:.1f} s")
    return 0


def _refuse_old_spelling(args: argparse.Namespace) -> None:
    """`convert MODEL_NAME MODEL_PATH --dst-path DIR` of other versions."""
    for name, why in _ABSENT_FLAGS.items():
        if hasattr(args, name):
            raise ConfigError(f"--{name.replace('_', '-')}: {why}; leave it out")
    model, directory = args.model_path, args.directory
    taken = bool(directory) and Path(directory).exists()
    if args.dst_path is not None or (taken and not _is_model(model) and _is_model(directory)):
        target = args.dst_path or "DIR"
        raise ConfigError(
            "`lmdeploy convert MODEL_NAME MODEL_PATH --dst-path DIR` is the spelling of other versions; no"
            f" name is needed: lmdeploy convert {directory or model} {target}"
        )
    if not directory:
        raise ConfigError(f"the folder to write is missing: lmdeploy convert {model} DIR")


def _is_model(text: str) -> bool:
    """Whether a model can be named so; what looks like a hub id counts as one."""
    from lmdeploy.models.files import locate
    from lmdeploy.models.hub import resolve_model_path

    try:
        return ("/" in text and not Path(text).exists()) or bool(locate(resolve_model_path(text)))
    except ModelError:
        return False
