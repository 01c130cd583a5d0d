"""The other benchmarks as parts of one run: scripts, their arguments, and the targets in what they print."""

from __future__ import annotations

import argparse
import fcntl
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measure.machine import Watch, renice
from measure.records import Record, Records
from measure.targets import Target
from measure.workers import Setup

BENCHMARKS = Path(__file__).resolve().parents[1]
SECONDS = 1800.0  # a script that takes longer has failed
# Name: script and arguments; what is in braces is filled in.
EXTRAS = {
    "accuracy": "accuracy.py --threads {threads} --json {json} {peers}",
    "host overhead": "engine_overhead.py --model {models}/1b-q4_0 --threads {threads} --json {json}",
    "profile of 1b": "profile_step.py --model {models}/1b-q4_0 --threads {threads} --context 1024",
    "profile of the demo model": "profile_step.py --threads {threads}",
    "servers": "serve_streams.py --threads {threads} {llama_server}",
    "speculation": "speculative.py",
    "packing": "pack_weights.py",
    "start": "start_time.py {converted}/135m {converted}/1b",
    "long context": "long_context.py --threads {threads} --engine-tokens 131072",
    "gaps of a stream": "stream_gap.py",
}
_SHOWN = {  # in result tables, which hold no paths of the machine they come from
    "models": "MODELS",
    "json": "FILE",
    "peers": "--peers PEERS",
    "llama_server": "--llama-server PATH --model 135m-q4_0.gguf",
    "threads": 2,
    "converted": "CONVERTED",
}
_GEMM = ("qkv", "o", "gate_up", "down", "head")


def run_extras(names: list[str], records: Records, setup: Setup, args: argparse.Namespace) -> None:
    """Runs those that have not run well yet, one after the other."""
    places = _places(setup, args)
    for name in names:
        if "error" not in last_extras(records).get(name, {"error": ""}):
            continue
        file = args.out / f"{name.replace(' ', '-')}.json"
        text = EXTRAS[name].format(json=file, **places)
        print(f"{name}: {text}", flush=True)
        shown = f"python benchmarks/{EXTRAS[name].format(**_SHOWN)}".strip()
        record = {"kind": "extra", "name": name, "command": shown, "at": time.time()}
        file.unlink(missing_ok=True)
        failed = _convert(setup, places["converted"]) if "{converted}" in EXTRAS[name] else ""
        record.update({"error": failed, "seconds": 0.0} if failed else _run(text.split(), args))
        if file.exists():
            record["figures"] = json.loads(file.read_text())
        records.add(record)
        print(f"  {record.get('error') or 'done'}, {record['seconds']:.0f} s", flush=True)


def _places(setup: Setup, args: argparse.Namespace) -> dict[str, Any]:
    """What the commands of EXTRAS name."""
    places: dict[str, Any] = {
        "models": setup.models,
        "threads": args.threads,
        "peers": "",
        "llama_server": "",
    }
    places["converted"] = args.out / "converted"
    if args.peers is not None and args.peers.exists():
        places["peers"] = f"--peers {args.peers}"
    if "llama.cpp" in setup.peers:
        model = next((setup.models / "135m-q4_0").glob("*.gguf"), "")
        binary = Path(setup.peers["llama.cpp"]["bin"]) / "llama-server"
        places["llama_server"] = f"--llama-server {binary} --model {model}"
    return places


def _convert(setup: Setup, out: Path) -> str:
    """Converted directories of today's layout; the error where that fails."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for model in ("135m", "1b"):
        source = setup.models / f"{model}-q4_0"
        command = [sys.executable, "-m", "lmdeploy", "convert", str(source), str(out / model)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return (done.stderr.strip().splitlines() or ["no message"])[-1]
    return ""


def _run(command: list[str], args: argparse.Namespace) -> Record:
    watch, begin = Watch(), time.perf_counter()
    with Path("/dev/null" if args.lock is None else args.lock).open("a") as lock:
        if args.lock is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen(
            [sys.executable, str(BENCHMARKS / command[0]), *command[1:]],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        if args.niceness is not None:
            renice(process.pid, args.niceness)
        try:
            out, errors = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            out, errors = "", f"not done within {SECONDS:.0f} s"
            process.wait()
    spent = {"seconds": time.perf_counter() - begin, "others": watch.others()}
    if process.returncode:
        return {**spent, "error": (errors.strip().splitlines() or ["no message"])[-1]}
    return {**spent, "text": out}


def last_extras(records: Records) -> dict[str, Record]:
    return {record["name"]: record for record in records.of_kind("extra")}


def targets_of_extras(records: Records) -> list[Target]:
    found = last_extras(records)
    return [
        *_accuracy(found.get("accuracy", {}).get("figures")),
        *_host(found.get("host overhead", {}).get("figures")),
        *_gemm(found.get("profile of 1b", {}).get("text", "")),
    ]


def _accuracy(figures: dict[str, dict[str, float]] | None) -> Iterator[Target]:
    if figures is None:
        return
    measure = next((s for name, s in figures.items() if name.endswith("(yardstick)")), None)
    for name, bound in (("fast", 2.0), ("auto", 1.0), ("exact", 0.05)):
        share = figures[name]["mean"] / measure["mean"] if measure and name in figures else None
        yield Target(f"mean KL to float32, {name}: multiple of llama.cpp's Q4_0", bound, False, share)


def _host(figures: dict[str, float] | None) -> Iterator[Target]:
    for rows, share in (figures or {}).items():
        yield Target(f"1b, {rows} sequences: share of the step in Python and around", 0.03, False, share)


def _gemm(text: str) -> Iterator[Target]:
    """Of profile_step.py's tables of many sequences: the products' share of the peak, and all else."""
    for title, operations in profile_tables(text):
        if not re.match(r"decode, (8|32) ", title) or "int8" not in operations:
            continue
        seconds = sum(operations[name]["ms"] for name in _GEMM) / 1e3
        peak = sum(operations[name]["gop"] for name in _GEMM) / seconds / operations["int8"]["gop"]
        yield Target(f"1b {title}: products, share of the int8 peak", 0.7, True, peak)
        share = 1 - seconds * 1e3 / operations["all"]["ms"]
        yield Target(f"1b {title}: share of attention and all the rest", 0.3, False, share)


def profile_tables(text: str) -> Iterator[tuple[str, dict[str, dict[str, float]]]]:
    """(title, figures by operation; the int8 peak with them) of each table that profile_step.py printed."""
    for part in re.split(r"^### ", text, flags=re.M)[1:]:
        operations: dict[str, dict[str, Any]] = {}
        for line in part.splitlines():
            cells = [cell.strip() for cell in line.strip("| ").split("|")]
            if len(cells) >= 2 and re.fullmatch(r"[\d.]+", cells[1]):
                gop = float(cells[4]) if len(cells) > 4 and re.fullmatch(r"[\d.]+", cells[4]) else 0.0
                operations[cells[0]] = {"ms": float(cells[1]), "gop": gop}
        peak = re.search(r"peaks int8 (\d+)", part)
        if peak is not None:
            operations["int8"] = {"ms": 0.0, "gop": float(peak[1])}
        yield part.splitlines()[0], operations
