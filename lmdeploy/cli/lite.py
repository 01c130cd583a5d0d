"""`lmdeploy lite ...`: compress a model's weights. The flags of its commands and what they say.

Owns flags and output; what is done is `lmdeploy.lite`'s business. Parsers are built without torch.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmdeploy.cli import lite_eval
from lmdeploy.cli.lite_progress import Progress
from lmdeploy.cli.signals import ended_by_signals
from lmdeploy.errors import ConfigError
from lmdeploy.lite.recipe import Recipe
from lmdeploy.quant.scheme import WHOLE_ROW, WeightScheme

if TYPE_CHECKING:
    from lmdeploy.lite.data import CalibrationSet
    from lmdeploy.lite.job import Done

_METHODS = {"auto_awq": ("awq", "awq+gptq"), "auto_gptq": ("gptq", "awq+gptq"), "smooth_quant": ()}
_FORMATS = {
    "auto_awq": ("awq", "gptq", "gptq_v2", "compressed-tensors"),
    "auto_gptq": ("gptq", "gptq_v2", "awq", "compressed-tensors"),
    "smooth_quant": ("w8a8",),
}
_DEFAULT_FORMATS = {
    "auto_awq": "awq; compressed-tensors for several kinds of matrices",
    "auto_gptq": "gptq with --w-sym, else gptq_v2; compressed-tensors for several kinds of matrices",
    "smooth_quant": "w8a8",
}
_GROUPS = (32, 64, 128, WHOLE_ROW)
_MIXED = "compressed-tensors"
_ABSENT_FLAGS = {
    "kv_bits": "the key/value cache needs no file: serve or chat with --quant-policy 8 or 4",
    "kv_sym": "the key/value cache needs no file: serve or chat with --quant-policy 8 or 4",
    "num_tp": "a result serves any number of threads",
    "calib_size": "say --calib-samples",
    "calib_image": "models here read text only",
}
_HELP = {
    "auto_awq": "4-bit weights with scales searched on calibration text (AWQ)",
    "auto_gptq": "4-bit or 8-bit weights, each rounding error made good by the next columns (GPTQ)",
    "smooth_quant": "8-bit weights for 8-bit activations (SmoothQuant)",
    "calibrate": "only the statistics of what each matrix is fed",
}


def add_parser(subparsers: Any) -> None:
    """Add the commands to the parser of `lmdeploy`."""
    lite = subparsers.add_parser("lite", help="compress a model's weights, on any machine")
    commands = lite.add_subparsers(dest="lite_command", metavar="COMMAND", required=True)
    for name, text in _HELP.items():
        parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        parser.add_argument("model", metavar="MODEL", help="Hugging Face directory or hub id; float weights")
        _add_common_flags(parser)
        if name in ("auto_awq", "auto_gptq"):
            _add_scheme_flags(parser, name)
        if name == "smooth_quant":
            parser.add_argument("--quant-dtype", default="int8", metavar="TYPE", help="int8")
        if name != "calibrate":
            _add_output_flags(parser, name)
    lite_eval.add_parser(commands)


def _add_common_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--work-dir", default="./work_dir", metavar="DIR", help="folder to write (default: ./work_dir)")
    add("--force", action="store_true", help="replace an earlier result in DIR; drop an unfinished one")
    add(
        "--calib-dataset",
        metavar="TEXT",
        help="calibration text: .txt, .jsonl or .parquet file, folder, or known name; several with weights:"
        " a.jsonl:0.7,b.txt:0.3 (default: a built-in mixture of English, Chinese, code and arithmetic)",
    )
    add("--calib-samples", type=int, default=128, metavar="N", help="windows of text; 0: none (default: 128)")
    add("--calib-seqlen", type=int, default=2048, metavar="N", help="tokens of a window (default: 2048)")
    add("--seed", type=int, default=0, metavar="N", help="of the choice of windows (default: 0)")
    add("--batch-size", type=int, metavar="N", help="windows computed at once (default: 2,048 tokens)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where to compute (default: cpu)")
    add("--revision", metavar="TEXT", help="branch, tag or commit of a hub id")
    add("--download-dir", metavar="DIR", help="the hub cache to use, for models and data sets")
    add("--trust-remote-code", action="store_true", help="no effect: code of a model is never run")
    for name in _ABSENT_FLAGS:
        add("--" + name.replace("_", "-"), dest=name, nargs="*", default=None, help=argparse.SUPPRESS)


def _add_scheme_flags(parser: argparse.ArgumentParser, name: str) -> None:
    add, methods = parser.add_argument, _METHODS[name]
    add("--w-bits", type=int, choices=(4, 8), default=4, help="bits of a weight (default: 4)")
    add(
        "--w-group-size",
        type=int,
        default=128,
        metavar="N",
        help="inputs that share a scale: 32, 64, 128, or -1 for all of a channel (default: 128)",
    )
    add("--w-sym", action="store_true", help="no zero points")
    add(
        "--method",
        choices=methods,
        default=default_method(name),
        help=f"{methods[0]}, or both: scales first, then rounding that makes errors good (default:"
        f" {default_method(name)})",
    )
    add(
        "--act-order",
        action=argparse.BooleanOptionalAction,
        help="gptq: groups of inputs of like size, the largest first (desc_act; formats gptq, gptq_v2);"
        " --no-act-order: inputs rounded as they come (default: the largest first, groups of neighbours)",
    )
    add("--damping", type=float, default=0.01, metavar="X", help="gptq: share of the mean added (0.01)")
    add("--target-bpw", type=float, metavar="X", help="mean bits per weight, shared out by sensitivity")
    add("--keep", type=int, default=0, metavar="N", help="so many most sensitive layers get more bits")
    add(
        "--head-bits",
        type=int,
        choices=(8, 16),
        default=16,
        help="of embedding and output matrix (default: 16, as they are)",
    )
    add("--keep-bits", type=int, choices=(8, 16), default=8, help="bits of those layers (default: 8)")


def _add_output_flags(parser: argparse.ArgumentParser, name: str) -> None:
    add, formats = parser.add_argument, _FORMATS[name]
    add(
        "--search-scale",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="search the scale of each group of matrices (default); without: a fixed ratio of 0.5",
    )
    add(
        "--clip",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="search narrower ranges (default)",
    )
    add(
        "--format",
        choices=formats,
        help=f"of the files (default: {_DEFAULT_FORMATS[name]})",
    )
    add("--no-report", action="store_true", help="end without measuring the result")
    lite_eval.add_eval_flags(parser.add_argument_group("the report at the end"))
    add(
        "--dtype",
        choices=("auto", "float16", "bfloat16"),
        default="auto",
        help="of tensors that are not quantised (default: auto, as they are)",
    )


def default_method(command: str) -> str:
    """The method of a command that is given none."""
    return "awq+gptq" if command == "auto_awq" else "gptq"


def run(args: argparse.Namespace) -> int:
    """Run one of the commands."""
    if args.lite_command == "eval":
        with ended_by_signals():
            return lite_eval.run(args)
    _refuse_absent(args)
    _check_packages()
    with ended_by_signals():
        return _calibrate(args) if args.lite_command == "calibrate" else _quantise(args)


def _quantise(args: argparse.Namespace) -> int:
    from lmdeploy.lite.job import Calibration, Output, check_job, quantise_model

    recipe, source, begin = recipe_of(args), _source(args), time.monotonic()
    output = Output(
        Path(args.work_dir).expanduser(),
        _format(args),
        None if args.dtype == "auto" else args.dtype,
        args.force,
    )
    _check_flags(args)
    if not args.no_report:
        lite_eval.check(args)
    check_job(source, recipe, output)
    data = _data(args, source)
    with _going_on(output.directory), Progress() as progress:
        done = quantise_model(
            source,
            recipe,
            Calibration(data.ids.tolist(), data.description),
            output,
            progress,
            args.device,
            args.batch_size,
        )
    _say_done(done, recipe, time.monotonic() - begin)
    lite_eval.conclude(args, source, done.directory)
    return 0


def _calibrate(args: argparse.Namespace) -> int:
    from lmdeploy.lite.calibrate import calibrate
    from lmdeploy.lite.job import Calibration, opened
    from lmdeploy.lite.workspace import check_output

    source, directory = _source(args), Path(args.work_dir).expanduser()
    _check_flags(args)
    if not args.calib_samples:
        raise ConfigError("--calib-samples is 0: there is nothing to gather statistics from")
    check_output(directory, args.force)
    with opened(source):  # refused before any text is read
        pass
    data = _data(args, source)
    calibration = Calibration(data.ids.tolist(), data.description)
    with _going_on(directory), Progress() as progress:
        calibrate(source, calibration, directory, progress, args.force, args.device, args.batch_size)
    print(f"{directory}: statistics of every layer")
    return 0


def recipe_of(args: argparse.Namespace) -> Recipe:
    """ConfigError for what does not go together."""
    if args.lite_command == "smooth_quant":
        if args.quant_dtype != "int8":
            raise ConfigError(f"--quant-dtype {args.quant_dtype} cannot be written (writable: int8)")
        scheme = WeightScheme(8, WHOLE_ROW, True)
        method: Any = "smooth_quant" if args.calib_samples else "rtn"
        return Recipe(method, scheme, args.search_scale, args.clip)
    if args.w_group_size not in _GROUPS:
        raise ConfigError(f"--w-group-size {args.w_group_size} cannot be written (writable: 32, 64, 128, -1)")
    if args.keep < 0:
        raise ConfigError(f"--keep {args.keep}: a number of layers is expected")
    if args.keep and args.target_bpw is not None:
        raise ConfigError("--keep and --target-bpw both say which layers get more bits; give one of them")
    if (args.keep or args.target_bpw is not None) and not args.calib_samples:
        raise ConfigError(
            "mixed precision measures sensitivity on calibration text, and --calib-samples is 0"
        )
    if args.target_bpw is not None and not 0 < args.target_bpw < 16:
        raise ConfigError(f"--target-bpw {args.target_bpw:g}: a number of bits below 16 is expected")
    if not 0 < args.damping < 1:
        raise ConfigError(f"--damping {args.damping}: a share between 0 and 1 is expected")
    method = args.method if args.calib_samples else "rtn"
    if args.act_order and "gptq" not in method:
        raise ConfigError(f"--act-order: inputs have an order in gptq only, and the method is {method}")
    return Recipe(
        method=method,
        scheme=WeightScheme(
            args.w_bits,
            args.w_group_size,
            args.w_sym,
            least_zero=int(_format(args) == "gptq" and not args.w_sym),
            ordered=bool(args.act_order) and args.w_group_size != WHOLE_ROW,
        ),
        search_scale=args.search_scale and args.calib_samples > 0,
        clip=args.clip and args.calib_samples > 0,
        act_order=args.act_order is not False and args.calib_samples > 0,
        damping=args.damping,
        keep=args.keep,
        keep_bits=args.keep_bits,
        target_bpw=args.target_bpw,
        head_bits=args.head_bits,
    )


def _format(args: argparse.Namespace) -> str:
    if args.format is not None:
        return str(args.format)
    mixed = args.lite_command != "smooth_quant" and (
        args.target_bpw is not None or args.keep > 0 or args.head_bits == 8
    )
    mixed = mixed or (args.lite_command == "auto_awq" and args.w_bits == 8)  # its own files hold 4 bits
    ordered = args.lite_command != "smooth_quant" and args.act_order and args.head_bits == 16
    if not ordered and (mixed or args.lite_command != "auto_gptq"):
        return _MIXED if mixed else _FORMATS[args.lite_command][0]
    return "gptq" if args.w_sym else "gptq_v2"  # version 1 has no zero point of 0


def _check_flags(args: argparse.Namespace) -> None:
    """Of those that all commands share."""
    from lmdeploy.lite.data import check_size
    from lmdeploy.lite.job import check_device

    check_size(args.calib_samples, args.calib_seqlen)
    if args.batch_size is not None and args.batch_size < 1:
        raise ConfigError(f"--batch-size {args.batch_size}: a number of windows above 0 is expected")
    check_device(args.device)


def _data(args: argparse.Namespace, source: Path) -> CalibrationSet:
    """Says what it is made of."""
    from lmdeploy.lite.data import calibration_windows
    from lmdeploy.text.chat_template import load_chat_template
    from lmdeploy.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(source)
    data = calibration_windows(
        args.calib_dataset,
        tokenizer,
        load_chat_template(source, tokenizer),
        args.calib_samples,
        args.calib_seqlen,
        args.seed,
        download_dir=args.download_dir,
    )
    for warning in data.warnings:
        print(f"warning: {warning}")
    print(data.line if len(data.ids) else "no calibration text: plain rounding", flush=True)
    return data


def _source(args: argparse.Namespace) -> Path:
    from lmdeploy.models.hub import resolve_model_path

    return resolve_model_path(args.model, args.revision, args.download_dir).absolute()


def _say_done(done: Done, recipe: Recipe, seconds: float) -> None:
    for note in done.notes:
        print(f"note: {note}")
    for index, (_, notes) in enumerate(done.layers):
        for note in notes:
            print(f"note: layer {index}: {note}")
    errors = [one.error for linears, _ in done.layers for one in linears]
    share = done.bytes / done.source_bytes
    print(
        f"{done.directory}: {recipe.method}, {done.bits_per_weight:.2f} bits per weight in the layers,"
        f" error of a matrix {100 * sum(errors) / len(errors):.2f} % (mean), weight files"
        f" {done.bytes / 1e6:.0f} MB ({100 * share:.0f} % of {done.source_bytes / 1e6:.0f} MB),"
        f" written in {seconds:.0f} s" + (" and an earlier run" if done.resumed else "")
    )


@contextmanager
def _going_on(directory: Path) -> Iterator[None]:
    """A run that is stopped says how it goes on."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        print(f"stopped; the same command goes on from the last finished layer ({directory}.partial)")
        raise


def _check_packages() -> None:
    missing = [name for name in ("torch", "pyarrow") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"`lmdeploy lite` needs {' and '.join(missing)}: run `pip install 'lmdeploy[lite]'`"
        )


def _refuse_absent(args: argparse.Namespace) -> None:
    for name, why in _ABSENT_FLAGS.items():
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} does not exist: {why}")
