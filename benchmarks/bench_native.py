"""The comparison of the native engine with its peers and with the machine: every row in one run.

    python benchmarks/bench_native.py --peers DIR/peers.toml --out results
    python benchmarks/bench_native.py --models 135m --rows decode1 --sides "lmdeploy auto" "llama.cpp Q4_0"

A row is a model and a case; in each round every side takes a turn, in an order that turns by one. A run that
was stopped goes on where it was (--fresh starts anew). A side that fails in a row is named with its error and
the run goes on. peers/setup.py installs the peers, makes the models and writes the file for --peers.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measure.arguments import described, positive
from measure.extras import EXTRAS, run_extras
from measure.machine import processor
from measure.records import Key, Records
from measure.report import write_into, write_report
from measure.results import Results
from measure.rows import CASES, MODELS, OURS, SIDES, Case, Side, cases_of
from measure.statistics import median
from measure.targets import close_sides
from measure.workers import Pool, Setup, WorkerError

TURN_SECONDS = 900.0  # a turn that takes longer has failed
TRIES = 2  # failures of a side in a row before it is left out there


def read_setup(path: Path | None, models: Path | None) -> Setup:
    if path is not None and not path.exists():
        print(f"{path} is missing, so no peer takes part: make bench-peers installs them", flush=True)
    if path is None or not path.exists():
        return Setup(models or Path("build/bench-models"), {})
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib
    found = tomllib.loads(path.read_text())
    folder = models or Path(found.pop("models"))
    return Setup(folder, {name: place for name, place in found.items() if isinstance(place, dict)})


def chosen_sides(names: list[str] | None, setup: Setup) -> list[Side]:
    """Those named, or all of which the engine is there. SystemExit for a name that is none."""
    known = {side.name: side for side in SIDES}
    if names is None:
        return [side for side in SIDES if side.engine == OURS or side.engine in setup.peers]
    for name in names:
        if name not in known:
            sys.exit(f"no side is called {name!r}; there are: {', '.join(known)}")
    return [known[name] for name in names]


def rows_of(args: argparse.Namespace) -> list[tuple[str, Case]]:
    return [(model, CASES[name]) for model in args.models for name in cases_of(model) if name in args.rows]


class Run:
    """One pass over all rows; `records` is what is known so far."""

    def __init__(self, args: argparse.Namespace, setup: Setup, records: Records) -> None:
        self._args, self._setup, self._records = args, setup, records
        self._sides = chosen_sides(args.sides, setup)
        memory = int(args.memory * 1e9)
        self._pool = Pool(setup, args.threads, memory, args.out / "logs", args.start_seconds)
        self._failed: dict[Key, int] = {}
        self._begin = time.perf_counter()

    def all_rows(self) -> None:
        rows = rows_of(self._args)
        try:
            for model in dict.fromkeys(model for model, _ in rows):
                cases = [case for name, case in rows if name == model]
                self._model(model, cases)
                for case in cases:
                    self._sharpen(model, case)
                self._pool.close()
        finally:
            self._pool.close()

    def _model(self, model: str, cases: list[Case]) -> None:
        sides = [side for side in self._sides if model in side.models]
        for number in range(self._args.rounds):
            for place, case in enumerate(cases):
                turn = (number + place) % len(sides)
                for side in [*sides[turn:], *sides[:turn]]:
                    self._turn(model, case, side, number)

    def _sharpen(self, model: str, case: Case) -> None:
        """More rounds for the sides of a ratio that is within a tenth of its bound."""
        known = {side.name: side for side in self._sides}
        for number in range(self._args.rounds, self._args.most_rounds):
            near = [known[name] for name in close_sides(Results(self._records), model, case) if name in known]
            for side in near if number % 2 else near[::-1]:
                self._turn(model, case, side, number)

    def _turn(self, model: str, case: Case, side: Side, number: int) -> None:
        key = (model, case.name, side.name)
        if len(self._records.turns().get(key, [])) > number or self._failed.get(key, 0) >= TRIES:
            return
        base = {"model": model, "case": case.name, "side": side.name, "round": number}
        try:
            worker = self._pool.get(model, side)
            with self._alone(worker):
                answer = worker.ask(case, TURN_SECONDS)
        except WorkerError as error:
            self._pool.drop(model, side)
            self._failed[key] = self._failed.get(key, 0) + 1
            told = str(error).replace(str(self._setup.models), "MODELS")
            self._records.add({"kind": "failure", **base, "error": told})
            self._say(f"{model} {case.name} {side.name}: failed: {error}")
            return
        facts = {name: worker.facts[name] for name in ("version", "load_seconds") if name in worker.facts}
        self._records.add({"kind": "turn", **base, **answer, **facts, "at": time.time()})
        figure = answer["decode" if case.decodes else "prefill"]
        self._say(f"{model} {case.name} {side.name}: {figure:.1f} tokens/s, others {answer['others']:.0%}")

    @contextlib.contextmanager
    def _alone(self, worker: Any) -> Iterator[None]:
        """Holds the lock file and the priority of a timed turn, where the user gave them."""
        with contextlib.ExitStack() as stack:
            if self._args.lock is not None:
                file = stack.enter_context(self._args.lock.open("a"))
                fcntl.flock(file, fcntl.LOCK_EX)
            if self._args.niceness is not None:
                before = os.getpriority(os.PRIO_PROCESS, 0)
                worker.set_niceness(self._args.niceness)
                stack.callback(worker.set_niceness, before)
            yield

    def _say(self, text: str) -> None:
        rows = rows_of(self._args)
        wanted = self._args.rounds * sum(sum(m in s.models for s in self._sides) for m, _ in rows)
        turns, names = self._records.turns(), [side.name for side in self._sides]
        keys = [(model, case.name, name) for model, case in rows for name in names]
        done = sum(min(len(turns.get(key, [])), self._args.rounds) for key in keys)
        minutes = (time.perf_counter() - self._begin) / 60
        print(f"[{done}/{wanted}, {minutes:.1f} min] {text}", flush=True)


def estimate(records: Records, args: argparse.Namespace, sides: list[Side]) -> str:
    """What a run of this selection takes, from the turns known so far."""
    turns = records.turns()
    known, unknown = 0.0, 0
    for model, case in rows_of(args):
        for side in sides:
            found = turns.get((model, case.name, side.name))
            missing = max(args.rounds - len(found or []), 0) if model in side.models else 0
            if found:
                known += missing * median([r["seconds"] for r in found])
            else:
                unknown += missing
    guess = f" and {unknown} turns not measured before" if unknown else ""
    return f"about {known / 60:.0f} minutes{guess}, loading not counted"


def parse() -> argparse.Namespace:
    parser = described(__doc__)
    parser.add_argument("--peers", type=Path, help="TOML file that says where peers and models are")
    parser.add_argument("--model-dir", type=Path, help="folder of the models, in place of that of --peers")
    parser.add_argument("--out", type=Path, default=Path("build/bench-native"), help="folder of the results")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rows", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--sides", nargs="+", help="such as 'lmdeploy auto'; default: all that are installed")
    parser.add_argument("--extras", nargs="*", choices=EXTRAS, default=list(EXTRAS), help="other benchmarks")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument(
        "--most-rounds", type=positive, default=15, help="where a ratio is close to its bound"
    )
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--memory", type=float, default=12.0, help="GB that loaded engines may hold together")
    parser.add_argument("--start-seconds", type=float, default=600.0, help="longest start of an engine")
    parser.add_argument("--lock", type=Path, help="file to lock during each turn, on a shared machine")
    parser.add_argument("--niceness", type=int, help="of a side during its turn, on a shared machine")
    parser.add_argument("--fresh", action="store_true", help="drop earlier results")
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
    if not args.report_only:
        setup = read_setup(args.peers, args.model_dir)
        print(estimate(records, args, chosen_sides(args.sides, setup)), flush=True)
        head = {"processor": processor(), "threads": args.threads, "date": time.strftime("%Y-%m-%d %H:%M")}
        records.add({"kind": "run", **head, "note": args.note})
        Run(args, setup, records).all_rows()
        run_extras(args.extras, records, setup, args)
    text = write_report(records, args.out)
    print(text)
    if args.docs is not None:
        write_into(args.docs, text, args.out / "chart.svg")


if __name__ == "__main__":
    main()
