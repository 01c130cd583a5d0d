"""Workers of the comparison: answers, ends and errors, with a small fake engine in place of a real one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from measure.rows import CASES, OURS, SIDES, Side
from measure.workers import Pool, Setup, Worker, WorkerError

FAKE = """
import sys
sys.path.insert(0, {peers!r})
from protocol import serve, timed

def load():
    print("noise on standard output")
    def generate(prompts, new, tick):
        if len(prompts) == 8:
            raise RuntimeError("eight are too many")
        if len(prompts) == 32:
            sys.exit("gone")
        for _ in range(new):
            tick(range(len(prompts)))
    return timed(generate, 1000), {{"version": "1"}}

serve(load)
"""
PEERS = Path(__file__).resolve().parents[2] / "benchmarks" / "peers"


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    script = tmp_path / "fake.py"
    script.write_text(FAKE.format(peers=str(PEERS)))
    return [sys.executable, str(script)]


def test_a_worker_answers_and_names_its_errors(command: list[str], tmp_path: Path) -> None:
    worker = Worker(command, tmp_path / "log", 60)
    assert worker.facts["version"] == "1"
    answer = worker.ask(CASES["decode1"], 60)
    assert answer["decode"] > 0 and answer["prefill"] > 0 and 0 <= answer["others"] <= 1
    assert "decode" not in worker.ask(CASES["prefill512"], 60)
    with pytest.raises(WorkerError, match="RuntimeError: eight are too many"):
        worker.ask(CASES["decode8"], 60)
    assert worker.ask(CASES["decode1"], 60)["decode"] > 0  # it goes on after an error
    with pytest.raises(WorkerError, match="the process ended: gone"):
        worker.ask(CASES["decode32"], 60)
    worker.close()
    assert "noise on standard output" in (tmp_path / "log").read_text()


def test_a_worker_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="the process ended: no such thing"):
        Worker([sys.executable, "-c", "raise SystemExit('no such thing')"], tmp_path / "log", 60)


def test_a_worker_that_is_killed_says_so(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="ended by SIGKILL"):
        Worker([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], tmp_path / "log", 60)


class FakeSetup(Setup):
    def command(self, side: Side, model: str, threads: int) -> list[str]:
        return list(self.peers["fake"].values())


def test_a_pool_keeps_what_fits_and_drops_the_quickest_to_load(command: list[str], tmp_path: Path) -> None:
    setup = FakeSetup(tmp_path, {"fake": dict(enumerate(command))})  # type: ignore[arg-type]
    pool = Pool(setup, 1, 1 << 40, tmp_path / "logs", 60)
    first, second = pool.get("1b", SIDES[0]), pool.get("1b", SIDES[1])
    assert pool.get("1b", SIDES[0]) is first
    first.facts["load_seconds"], second.facts["load_seconds"] = 9.0, 1.0
    pool._memory = first.resident_bytes() * 3 // 2
    pool.get("1b", SIDES[2])
    assert pool.get("1b", SIDES[0]) is first
    assert pool.get("1b", SIDES[1]) is not second
    pool.close()


def test_missing_models_and_peers_are_named(tmp_path: Path) -> None:
    setup = Setup(tmp_path, {})
    with pytest.raises(WorkerError, match="1b-q4_0 is missing"):
        setup.command(Side(OURS, "auto", "q4_0"), "1b", 2)
    (tmp_path / "1b-q4_0").mkdir()
    assert setup.command(Side(OURS, "auto", "q4_0"), "1b", 2)[-1] == "auto"
    with pytest.raises(WorkerError, match=r"llama\.cpp is not installed"):
        setup.command(Side("llama.cpp", "Q4_0", "q4_0"), "1b", 2)
