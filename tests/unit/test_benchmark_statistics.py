"""The statistics, clocks and judgements of the benchmarks, on numbers worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from measure.chart import chart
from measure.extras import profile_tables, targets_of_extras
from measure.machine import Watch
from measure.records import Records
from measure.report import BEGIN, END, write_into, write_report
from measure.results import Results, limit_ratio
from measure.rows import CASES
from measure.statistics import geometric_mean, interval, spread
from measure.targets import close_sides, targets
from peers.protocol import Clock


def test_geometric_mean_and_spread() -> None:
    assert geometric_mean([1.0, 4.0, 16.0]) == pytest.approx(4.0)
    assert spread([9.0, 10.0, 12.0]) == pytest.approx(0.3)
    with pytest.raises(ValueError, match="no values"):
        geometric_mean([])


@pytest.mark.parametrize(
    ("n", "low", "high"), [(1, 1, 1), (4, 1, 4), (5, 1, 5), (8, 2, 7), (15, 4, 12), (20, 6, 15)]
)
def test_interval_has_the_ranks_of_the_sign_test(n: int, low: int, high: int) -> None:
    """Ranks from tables of the binomial distribution; the order of the values does not matter."""
    values = [float(v) for v in range(1, n + 1)]
    assert interval(values[::-1]) == (low, high)
    if n >= 5:
        miss = 2 * sum(math.comb(n, i) for i in range(low)) / 2**n
        assert miss <= 0.1
        assert 2 * sum(math.comb(n, i) for i in range(low + 1)) / 2**n > 0.1


class FakeTime:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_clock_counts_only_while_all_decode() -> None:
    time = FakeTime()
    clock = Clock(2, 3, time)
    for at, advanced in ((1.0, [0]), (2.0, [0, 1]), (2.5, [0, 1]), (9.0, [1])):
        time.now = at
        clock.tick(advanced)
    assert clock.first == 2.0
    assert clock.rate() == pytest.approx(2 / 0.5)
    clock.check()


def test_clock_refuses_what_it_did_not_see() -> None:
    time = FakeTime()
    clock = Clock(1, 2, time)
    time.now = 1.0
    clock.tick([0])
    with pytest.raises(RuntimeError, match="more new tokens"):
        clock.rate()
    with pytest.raises(RuntimeError, match="2 tokens were asked"):
        clock.check()


def turn(
    side: str, number: int, case: str = "decode1", model: str = "135m", **figures: float
) -> dict[str, Any]:
    base = {"kind": "turn", "model": model, "case": case, "side": side, "round": number, "others": 0.0}
    return {**base, "seconds": 1.0, "version": "1", **figures}


LIMITS = {
    "read": 50e9,
    "int8_peak": 1e12,
    "float_peak": 5e11,
    "weight_bytes": 100e6,
    "kv_bytes": 0.0,
    "linear_parameters": 1e9,
}


def test_limits_are_those_of_the_turn() -> None:
    decode = turn("lmdeploy auto", 0, decode=400.0, **LIMITS)
    assert limit_ratio(CASES["decode1"], decode, "auto") == pytest.approx(2.5e-3 / 2e-3)
    prefill = turn("lmdeploy fast", 0, prefill=300.0, **LIMITS)
    assert limit_ratio(CASES["prefill512"], prefill, "fast") == pytest.approx(0.6)
    assert limit_ratio(CASES["prefill512"], prefill, "exact") == pytest.approx(1.2)
    assert limit_ratio(CASES["prefill512"], prefill, "bf16") == pytest.approx(1.2)
    assert limit_ratio(CASES["decode8"], decode, "auto") is None


def written(path: Path, *records: dict[str, Any]) -> Records:
    found = Records(path)
    for record in records:
        found.add(record)
    return found


def test_ratios_pair_turns_of_a_round(tmp_path: Path) -> None:
    records = written(
        tmp_path / "r.jsonl",
        *(turn("lmdeploy fast", i, decode=v, **LIMITS) for i, v in enumerate((200.0, 100.0, 300.0))),
        *(turn("llama.cpp Q4_0", i, decode=v) for i, v in enumerate((100.0, 50.0, 100.0))),
        *(turn("transformers bf16", i, decode=10.0) for i in range(3)),
    )
    results = Results(records)
    assert results.fastest_peer("135m", CASES["decode1"]) == "llama.cpp Q4_0"
    ratio = results.to_peer("135m", CASES["decode1"], "fast")
    assert ratio is not None and (ratio.value, ratio.low, ratio.high, ratio.pairs) == (2.0, 2.0, 3.0, 3)
    verdicts = {t.what: t.verdict for t in targets(results)}
    assert verdicts["135m decode1, fast: speed / fastest peer"] == "met"
    assert verdicts["geometric mean of 1 rows up to 1b, fast / fastest peer"] == "met"
    assert verdicts["135m decode1, auto: speed / fastest peer"] == "not measured"


def test_a_bound_that_is_not_reached_is_missed(tmp_path: Path) -> None:
    turns = [turn("lmdeploy auto", 0, decode=100.0, **LIMITS), turn("llama.cpp Q4_0", 0, decode=101.0)]
    missed = {
        t.what for t in targets(Results(written(tmp_path / "r.jsonl", *turns))) if t.verdict == "missed"
    }
    assert missed == {
        "135m decode, 1 sequence, auto: time / time to read",
        "135m decode1, auto: speed / fastest peer",
    }


def test_sides_close_to_a_bound_are_found(tmp_path: Path) -> None:
    ours = [
        turn("lmdeploy auto", 0, decode=480.0, **LIMITS),
        turn("lmdeploy fast", 0, decode=700.0, **LIMITS),
    ]
    peer = turn("llama.cpp Q4_0", 0, decode=450.0)
    results = Results(written(tmp_path / "r.jsonl", *ours, peer, turn("vllm bf16", 0, decode=449.0)))
    assert close_sides(results, "135m", CASES["decode1"]) == ["lmdeploy auto", "llama.cpp Q4_0"]
    alone = Results(written(tmp_path / "s.jsonl", turn("lmdeploy auto", 0, decode=400.0, **LIMITS)))
    assert close_sides(alone, "135m", CASES["decode1"]) == ["lmdeploy auto"]  # 1.25 of the reading time
    far = Results(written(tmp_path / "t.jsonl", turn("lmdeploy auto", 0, decode=200.0, **LIMITS), peer))
    assert close_sides(far, "135m", CASES["decode1"]) == []


def test_records_survive_a_line_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    written(path, turn("lmdeploy auto", 0, decode=1.0))
    with path.open("a") as file:
        file.write('{"kind": "turn", "mo')
    again = Records(path)
    assert len(again.all) == 1
    again.add(turn("lmdeploy auto", 1, decode=1.0))
    assert len(Records(path).turns()["135m", "decode1", "lmdeploy auto"]) == 2


def test_a_failure_is_named_until_there_is_a_figure(tmp_path: Path) -> None:
    failure = {"kind": "failure", "model": "1b", "case": "decode1", "side": "vllm bf16", "error": "no room"}
    records = written(tmp_path / "r.jsonl", failure)
    assert records.failures() == {("1b", "decode1", "vllm bf16"): "no room"}
    records.add(turn("vllm bf16", 0, model="1b", decode=1.0))
    assert records.failures() == {}


def test_report_and_chart(tmp_path: Path) -> None:
    run = {"kind": "run", "processor": "Any <CPU>", "threads": 2, "date": "2026-01-01 00:00"}
    figures = [turn("lmdeploy fast", 0, decode=300.0, **LIMITS), turn("llama.cpp Q4_0", 0, decode=150.0)]
    records = written(tmp_path / "r.jsonl", run, *figures)
    text = write_report(records, tmp_path)
    assert "| fast / fastest peer | 2.00, llama.cpp Q4_0 |" in text
    assert "read 50.0 GB/s" in text
    assert (tmp_path / "results.md").read_text() == text + "\n"
    assert json.loads((tmp_path / "results.json").read_text())["rows"][0]["turns"][0]["decode"] == 300.0
    picture = chart(Results(records))
    assert picture.startswith("<svg") and "2.00  (300 tokens/s)" in picture


def test_results_replace_those_on_the_page(tmp_path: Path) -> None:
    page, picture = tmp_path / "page.md", tmp_path / "chart.svg"
    picture.write_text("<svg/>")
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_into(page, "| new |", picture)
    write_into(page, "| newer |", picture)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "| newer |" in text
    assert "old" not in text and "| new |" not in text and "(page.svg)" in text
    assert (tmp_path / "page.svg").read_text() == "<svg/>"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="no place for results"):
        write_into(page, "text", picture)


def test_watch_sees_its_own_work_as_its_own() -> None:
    watch = Watch()
    begin = watch.own()
    sum(i * i for i in range(400_000))
    assert watch.own() > begin
    assert 0 <= watch.others() <= 1


PROFILE = """
### decode, 8 sequences, 1024 tokens each

| operation | ms | share | MB | GOP | limit ms | ratio |
|---|---|---|---|---|---|---|
| qkv | 10.000 | 10.0% | 9.90 | 1.00 | 0.3 | 2.0 |
| o | 10.000 | 10.0% | 9.90 | 1.00 | 0.3 | 2.0 |
| gate_up | 20.000 | 20.0% | 9.90 | 4.00 | 0.3 | 2.0 |
| down | 10.000 | 10.0% | 9.90 | 2.00 | 0.3 | 2.0 |
| head | 10.000 | 10.0% | 9.90 | 2.00 | 0.3 | 2.0 |
| barrier | 40.000 | 40.0% | 245 barriers | | | |
| all | 100.000 | | | | 45.0 | 2.2 |

read 60.0 GB/s of 100 MB; peaks int8 500, bfloat16 250, float 125 GOP/s; 2 threads, kernels avx512
"""


def test_targets_of_the_other_benchmarks(tmp_path: Path) -> None:
    title, operations = next(iter(profile_tables(PROFILE)))
    assert title == "decode, 8 sequences, 1024 tokens each"
    assert operations["gate_up"] == {"ms": 20.0, "gop": 4.0} and operations["barrier"]["gop"] == 0
    kl = {"fast": {"mean": 0.003}, "exact": {"mean": 0.00001}, "llama.cpp Q4_0 (yardstick)": {"mean": 0.002}}
    records = written(
        tmp_path / "r.jsonl",
        {"kind": "extra", "name": "profile of 1b", "text": PROFILE},
        {"kind": "extra", "name": "accuracy", "figures": kl},
        {"kind": "extra", "name": "host overhead", "figures": {"1": 0.05}},
        {"kind": "extra", "name": "host overhead", "figures": {"1": 0.01, "64": 0.04}},
    )
    found = {t.what: (t.value, t.verdict) for t in targets_of_extras(records)}
    assert found["mean KL to float32, fast: multiple of llama.cpp's Q4_0"] == (pytest.approx(1.5), "met")
    assert found["mean KL to float32, auto: multiple of llama.cpp's Q4_0"] == (None, "not measured")
    assert found["mean KL to float32, exact: multiple of llama.cpp's Q4_0"][1] == "met"
    assert [verdict for what, (_, verdict) in found.items() if "in Python" in what] == ["met", "missed"]
    eight = "1b decode, 8 sequences, 1024 tokens each"
    assert found[f"{eight}: products, share of the int8 peak"] == (pytest.approx(10 / 0.06 / 500), "missed")
    assert found[f"{eight}: share of attention and all the rest"] == (pytest.approx(0.4), "missed")
