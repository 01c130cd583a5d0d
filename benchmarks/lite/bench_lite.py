"""Our quantisers beside others and beside llama.cpp's kinds: same data, one harness, every target judged.

    python benchmarks/lite/bench_lite.py --rivals DIR/rivals.toml --out results
    python benchmarks/lite/bench_lite.py --models demo --cases "group 128" --samples 4 --length 128

Each side makes its model of the demo model and of its grid-free twin, from the same calibration tokens; the
models are judged on the same held-out tokens and deleted. A run that was stopped goes on where it was
(--fresh starts anew, --again NAME repeats sides whose name holds NAME). A side that fails is named with its
error and the run goes on. setup.py installs the others and writes the file for --rivals.
"""

from __future__ import annotations

import shutil
import signal
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import torch
from demo_directory import demo_directory
from measure.arguments import described, positive
from measure.machine import processor
from measure.records import Records

from lite.evaluate import Judge, facts_of
from lite.make import Made, MakeError, Workshop
from lite.report import write_into, write_report
from lite.sides import CASES, MODELS, SIDES, Side
from lite.texts import held_out
from lite.twin import make_twin
from lmdeploy.errors import LMDeployError
from lmdeploy.text.tokenizer import load_tokenizer

WINDOW, SKIP = 512, 64  # held-out tokens computed together, and how many of them are not scored
TRIES = 2  # failures of a side before it is left out


def read_rivals(path: Path | None) -> dict[str, dict[str, str]]:
    if path is None or not path.exists():
        return {}
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib
    return {name: dict(place) for name, place in tomllib.loads(path.read_text()).items()}


def originals(out: Path) -> dict[str, Path]:
    """The demo model as a directory, and its twin."""
    folder = out.resolve() / "models"
    folder.mkdir(parents=True, exist_ok=True)
    demo, twin = folder / "demo", folder / "twin"
    demo_directory(demo)
    return {"demo": demo, "twin": twin if twin.exists() else make_twin(demo, twin)}


class Run:
    """One pass over all sides; `records` is what is known so far."""

    def __init__(self, args: Namespace, records: Records) -> None:
        self._args, self._records = args, records
        models = originals(args.out)
        rivals = read_rivals(args.rivals)
        self._workshop = Workshop(
            args.out.resolve(), models, rivals, args.samples, args.length, args.minutes * 60
        )
        tokenizer = load_tokenizer(models["demo"])
        self._windows = held_out(tokenizer, args.windows, WINDOW)
        self._begin = time.perf_counter()

    def everything(self) -> None:
        """Each side of both models before the next, so that a run cut short can still be judged."""
        judges: dict[str, Judge] = {}
        turns = [
            (side, model) for side in self.sides() for model in side.models if model in self._args.models
        ]
        for number, (side, model) in enumerate(turns, 1):
            key = (model, side.case, side.name)
            failed = sum((r["model"], r["case"], r["side"]) == key for r in self._records.of_kind("failure"))
            if key in self._records.turns() or failed >= TRIES:
                continue
            if model not in judges:
                judges[model] = Judge(self._workshop.models[model], self._windows, SKIP)
            said = self._turn(side, model, judges[model])
            minutes = (time.perf_counter() - self._begin) / 60
            print(
                f"[{number}/{len(turns)}, {minutes:.1f} min] {model} {side.case}, {side.name}: {said}",
                flush=True,
            )

    def sides(self) -> list[Side]:
        """The originals first: everything is measured against them."""
        wanted = [side for side in SIDES if side.case in self._args.cases]
        names = self._args.sides
        chosen = [side for side in wanted if names is None or any(name in side.name for name in names)]
        return [*(side for side in SIDES if side.case == "original"), *chosen]

    def _turn(self, side: Side, model: str, judge: Judge) -> str:
        base = {"model": model, "case": side.case, "side": side.name, "made_of": side.made_of}
        try:
            found = self._known(side, model) or self._measured(side, model, judge)
        except (MakeError, LMDeployError) as error:
            self._records.add({"kind": "failure", **base, "error": self._shortened(str(error))})
            return f"failed: {error}"
        self._records.add({**found, "kind": "turn", **base})
        return (
            f"perplexity {found['perplexity']:.3f}, KL {found['kl']:.4f}, {found['bits_per_weight']:.2f} bits"
        )

    def _known(self, side: Side, model: str) -> dict[str, Any] | None:
        """What was found of the same model in another table."""
        turns = (r for r in self._records.of_kind("turn") if r["model"] == model)
        return next((r for r in turns if r["made_of"] == side.made_of), None)

    def _measured(self, side: Side, model: str, judge: Judge) -> dict[str, Any]:
        made = self._workshop.make(side, model)
        found = {**judge.judge(made.path), **facts_of(made.path), **made.facts(), "at": time.time()}
        self._tidy(side, made)
        return found

    def _tidy(self, side: Side, made: Made) -> None:
        if side.maker != "original" and not self._args.keep:
            shutil.rmtree(made.path)

    def _shortened(self, error: str) -> str:
        return error.replace(f"{self._args.out.resolve()}/", "")


def check_same(records: Records, sizes: dict[str, int]) -> None:
    """SystemExit when earlier results are of other data: one table must not mix them."""
    for run in records.of_kind("run"):
        earlier = {name: run[name] for name in sizes}
        if earlier != sizes:
            sys.exit(
                f"{records.path} holds results with {earlier}, not {sizes}; give --fresh or another --out"
            )


def parse() -> Namespace:
    parser = described(__doc__)
    parser.add_argument("--rivals", type=Path, help="TOML file that says where other quantisers are")
    parser.add_argument("--out", type=Path, default=Path("build/bench-lite"), help="folder of the results")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--sides", nargs="+", metavar="NAME", help="only those whose name holds one of these")
    parser.add_argument("--samples", type=positive, default=32, help="of calibration")
    parser.add_argument("--length", type=positive, default=512, help="tokens of a sample")
    parser.add_argument("--windows", type=positive, default=16, help=f"of {WINDOW} held-out tokens")
    parser.add_argument("--minutes", type=positive, default=240, help="longest time of a side")
    parser.add_argument("--threads", type=positive, default=2, help="of the judge")
    parser.add_argument("--keep", action="store_true", help="keep the quantised models")
    parser.add_argument("--fresh", action="store_true", help="drop earlier results")
    parser.add_argument("--again", nargs="+", metavar="NAME", default=[], help="drop those of these sides")
    parser.add_argument("--note", default="", help="sentence for the head of the results")
    parser.add_argument("--docs", type=Path, help="Markdown page to write the results into")
    parser.add_argument("--report-only", action="store_true", help="write the tables of earlier results")
    return parser.parse_args()


def main() -> None:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped; the same command goes on from here"))
    file = args.out / "records.jsonl"
    if args.fresh:
        file.unlink(missing_ok=True)
    records = Records(file)
    if args.again:
        records.drop(lambda r: any(name in r.get("side", "") for name in args.again))
    if not args.report_only:
        torch.set_num_threads(args.threads)
        head = {"processor": processor(), "threads": args.threads, "date": time.strftime("%Y-%m-%d %H:%M")}
        sizes = {
            "samples": args.samples,
            "length": args.length,
            "positions": args.windows * (WINDOW - SKIP - 1),
        }
        check_same(records, sizes)
        records.add({"kind": "run", **head, **sizes, "note": args.note})
        Run(args, records).everything()
    text = write_report(records, args.out)
    print(text)
    if args.docs is not None:
        write_into(args.docs, text, args.out / "chart.svg")


if __name__ == "__main__":
    main()
