"""Whether one build is faster than another: the same command on both, in alternating pairs.

    python benchmarks/ab.py BUILD_A BUILD_B -- python benchmarks/profile_step.py --decode 1 --prefill 0
    python benchmarks/ab.py BUILD_A BUILD_B --pattern 'all \\| ([0-9.]+)' -- python benchmarks/profile_step.py

A build is a source tree with its native module; the command runs in it, with it first on Python's path. What
is compared is the CPU time the command took (children included), its wall time, or the number that the group
of --pattern finds in its output. Prints the median of B / A over the pairs and its 90 % interval; with at
least 15 pairs bounds below a tenth can be shown.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from measure.arguments import positive
from measure.machine import Watch
from measure.statistics import interval, median

WHAT = ("cpu", "wall")


def once(build: Path, command: list[str], what: str, pattern: re.Pattern[str] | None) -> float:
    """Seconds, or the number found. SystemExit when the command fails or the pattern finds none."""
    python_path = os.pathsep.join(filter(None, [str(build), os.environ.get("PYTHONPATH")]))
    watch, begin = Watch(), time.perf_counter()
    done = subprocess.run(
        command, cwd=build, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": python_path}
    )
    wall = time.perf_counter() - begin
    if done.returncode:
        sys.exit(f"in {build} the command failed:\n{done.stderr[-2000:]}")
    if pattern is None:
        return watch.own() if what == "cpu" else wall
    found = pattern.search(done.stdout)
    if found is None:
        sys.exit(f"in {build} the command's output has nothing like {pattern.pattern!r}")
    return float(found[1])


def parse() -> tuple[argparse.Namespace, list[str]]:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=raw, usage="%(prog)s BUILD_A BUILD_B [options] -- COMMAND ..."
    )
    parser.add_argument("a", type=Path, metavar="BUILD_A")
    parser.add_argument("b", type=Path, metavar="BUILD_B")
    parser.add_argument("--pairs", type=positive, default=15)
    parser.add_argument("--what", choices=WHAT, default="cpu")
    parser.add_argument("--pattern", type=re.compile, help="regular expression with one group, a number")
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    args, command = parser.parse_args(given[:cut]), given[cut + 1 :]
    if not command:
        parser.error("the command is missing: -- COMMAND ...")
    for build in (args.a, args.b):
        if not build.is_dir():
            parser.error(f"{build} is no folder")
    return args, command


def main() -> None:
    args, command = parse()
    ratios = []
    for pair in range(args.pairs):
        builds = [args.a.resolve(), args.b.resolve()]
        order = slice(None, None, -1 if pair % 2 else 1)  # who goes first takes turns, too
        found = [once(build, command, args.what, args.pattern) for build in builds[order]]
        a, b = found[order]
        ratios.append(b / a)
        print(f"pair {pair + 1}: A {a:.4g}, B {b:.4g}, B / A {b / a:.4f}", flush=True)
    low, high = interval(ratios)
    shown = not low <= 1 <= high
    verdict = "a difference" if shown else "no difference shown"
    bounds = f"90 % interval {low:.4f} to {high:.4f}, {len(ratios)} pairs"
    print(f"B / A median {median(ratios):.4f}, {bounds}: {verdict}")


if __name__ == "__main__":
    main()
