"""`lmdeploy lite eval A [B ...]`, and the report at the end of every quantisation.

Owns flags, progress and where the report is put; `quality` measures. Imports no torch before it runs.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmdeploy.cli.lite_progress import Progress
from lmdeploy.env import OPENAI_API_KEY
from lmdeploy.errors import ConfigError

if TYPE_CHECKING:
    from lmdeploy.quality.options import EvalOptions

_EXTRA = "measuring quality needs torch: pip install 'lmdeploy[lite]'"


def add_parser(subparsers: Any) -> None:
    """Add `eval` to the parser of `lmdeploy lite`."""
    parser = subparsers.add_parser(
        "eval",
        help="compare models with an original: perplexity, KL, answers, sizes",
        description="Measure how far models are from an original on held-out text and on 96 questions; print"
        " a table and write quality.json and quality.html. Without others the original alone is measured.",
    )
    parser.add_argument("original", metavar="A", help="the original: directory, GGUF file or hub id")
    parser.add_argument("others", metavar="B", nargs="*", help="models to compare with it")
    parser.add_argument(
        "--work-dir", default="quality", metavar="DIR", help="folder for quality.json and quality.html"
    )
    add_eval_flags(parser)


def add_eval_flags(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """What is measured; shared with the commands that quantise."""
    parser.add_argument(
        "--eval-samples", type=int, default=4, metavar="N", help="windows of text of each domain"
    )
    parser.add_argument("--eval-seqlen", type=int, default=512, metavar="N", help="tokens of a window")
    parser.add_argument(
        "--eval-text",
        nargs="+",
        default=[],
        metavar="FILE",
        help=".txt or .jsonl (field text) in place of the built-in held-out text, each a domain",
    )
    parser.add_argument(
        "--eval-file",
        metavar="FILE",
        help="questions of your own beside the built-in ones: .jsonl with prompt or messages, and expected,"
        " regex, json_schema or check",
    )
    parser.add_argument("--no-behaviours", action="store_true", help="do not ask the built-in questions")
    parser.add_argument("--no-layers", action="store_true", help="do not compare layer by layer")
    parser.add_argument("--eval-seed", type=int, default=0, metavar="N", help="seed of sampled answers")
    parser.add_argument(
        "--judge", metavar="URL", help="OpenAI-compatible endpoint that compares answers that differ"
    )
    parser.add_argument("--judge-model", metavar="NAME", help="its model; default: the first it lists")
    parser.add_argument(
        "--judge-timeout", type=float, default=60.0, metavar="S", help="seconds for each question to it"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    report(args, args.original, args.others, Path(args.work_dir).expanduser())
    return 0


def check(args: argparse.Namespace) -> None:
    """What `report` would refuse of the flags, before anything is computed. ConfigError."""
    options = eval_options(args)
    try:
        from lmdeploy.quality.report import check_options
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigError(_EXTRA) from None
    check_options(options)


def conclude(args: argparse.Namespace, original: str | Path, result: str | Path) -> None:
    """The report with which a quantisation ends, in its result's folder; nothing with `--no-report`."""
    if not args.no_report:
        print("measuring the result (--no-report leaves it out)", flush=True)
        report(args, original, [result], Path(result))


def report(
    args: argparse.Namespace, original: str | Path, others: Sequence[str | Path], folder: Path
) -> None:
    """Compare as the flags say; the report is printed and put into `folder`."""
    options = eval_options(args)
    try:
        from lmdeploy.quality.report import compare
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigError(_EXTRA) from None
    with Progress() as progress:
        found = compare(original, others, options, progress)
    found.table()
    written, page = found.write(folder)
    print(f"Written: {written} and {page}")


def eval_options(args: argparse.Namespace) -> EvalOptions:
    """Checked; ConfigError names the flag."""
    from lmdeploy.quality.options import EvalOptions, JudgeOptions

    judge = None
    if args.judge is not None:
        judge = JudgeOptions(args.judge, args.judge_model, OPENAI_API_KEY.text(), args.judge_timeout)
    return EvalOptions(
        samples=args.eval_samples,
        seqlen=args.eval_seqlen,
        texts=tuple(args.eval_text),
        behaviours=not args.no_behaviours,
        layers=not args.no_layers,
        eval_file=args.eval_file,
        judge=judge,
        seed=args.eval_seed,
        command="lmdeploy " + shlex.join(sys.argv[1:]),
    )
