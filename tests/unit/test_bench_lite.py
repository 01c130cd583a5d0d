"""The comparison of quantisers: what its figures are judged to be, its text, its process runner."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from lite.chart import chart
from lite.make import MakeError, Workshop, last_line, version_of
from lite.report import BEGIN, END, write_into, write_report
from lite.results import Results
from lite.sides import AWQ, BEST, CURVE, GPTQ, NARROW, PLAIN, SIDES, SMOOTH, WIDE, Side
from lite.sizes import share_of_float16
from lite.spawn import spawn
from lite.targets import targets
from lite.texts import calibration, held_out
from measure.records import Records


def turn(model: str, case: str, side: str, perplexity: float, **more: float) -> dict[str, Any]:
    facts = {"kl": 0.1, "kl_p99": 1.0, "bits_per_weight": 4.25, "seconds": 60.0, "cpu_seconds": 30.0}
    rest = {"size_mb": 100.0, "peak_mb": 900.0, **more}
    return {
        "kind": "turn",
        "model": model,
        "case": case,
        "side": side,
        "perplexity": perplexity,
        **facts,
        **rest,
    }


def records(path: Path, *turns: dict[str, Any]) -> Records:
    found = Records(path / "records.jsonl")
    for model in ("demo", "twin"):
        found.add(turn(model, "original", "original", 10.0))
    for record in turns:
        found.add(record)
    return found


def both(case: str, side: str, demo: float, twin: float, **more: float) -> list[dict[str, Any]]:
    return [turn("demo", case, side, demo, **more), turn("twin", case, side, twin, **more)]


def verdicts(found: Records) -> dict[str, str]:
    return {target.what: target.verdict for target in targets(Results(found))}


def of(found: dict[str, str], start: str) -> str:
    return next(verdict for what, verdict in found.items() if what.startswith(start))


def test_a_method_must_win_on_both_models(tmp_path: Path) -> None:
    plain = both(WIDE, PLAIN, 12.0, 12.0)
    good, uneven = both(WIDE, AWQ, 11.3, 11.35), both(WIDE, AWQ, 10.1, 11.5)
    assert of(verdicts(records(tmp_path / "a", *plain, *good)), "AWQ, group 128") == "met"
    assert of(verdicts(records(tmp_path / "b", *plain, *uneven)), "AWQ, group 128") == "missed"
    assert of(verdicts(records(tmp_path / "c", *plain, good[0])), "AWQ, group 128") == "not measured"


def test_the_best_method_is_one_and_the_same(tmp_path: Path) -> None:
    """Each of two methods wins on one model: neither has met what both together would have."""
    turns = [*both(WIDE, PLAIN, 12.0, 12.0), *both(WIDE, GPTQ, 10.8, 11.2), *both(WIDE, BEST, 11.2, 10.8)]
    results = Results(records(tmp_path / "a", *turns))
    name, value = results.best_ours(WIDE, lambda model, side: results.to_plain(model, WIDE, side))
    assert name == GPTQ and value == pytest.approx(0.6)
    assert of(verdicts(records(tmp_path / "b", *turns)), "best method (GPTQ), group 128") == "missed"


def test_the_best_rival_is_that_of_each_model(tmp_path: Path) -> None:
    turns = [
        *both(NARROW, BEST, 10.8, 10.8),
        *both(NARROW, "AutoAWQ", 11.0, 10.85),
        *both(NARROW, "GPTQModel GPTQ", 10.9, 11.5),
    ]
    results = Results(records(tmp_path, *turns))
    assert [results.best_rival(model) for model in ("demo", "twin")] == ["GPTQModel GPTQ", "AutoAWQ"]
    name, value = results.best_ours(NARROW, results.to_rival)
    assert name == BEST and value == pytest.approx(0.8 / 0.85)
    assert of(verdicts(records(tmp_path / "b", *turns)), f"best method ({BEST}), group 64") == "missed"


def test_the_curve_between_its_points_and_beyond(tmp_path: Path) -> None:
    kinds = [("Q4_0", 4.5, 0.1), ("Q4_K_M", 5.5, 0.001)]
    turns = [turn("demo", CURVE, k, 11.0, bits_per_weight=b, kl=kl) for k, b, kl in kinds]
    results = Results(records(tmp_path, *turns))
    assert results.curve("demo", 5.0) == pytest.approx(0.01)
    assert results.curve("demo", 4.25) == pytest.approx(0.1) and results.curve("demo", 6.0) == pytest.approx(
        0.001
    )
    assert results.curve("twin", 5.0) is None


def test_bits_are_judged_at_what_they_came_to(tmp_path: Path) -> None:
    """A file that took more bits than asked is compared with the curve where it stands."""
    turns = [
        *both(CURVE, "Q4_0", 11.0, 11.0, bits_per_weight=4.5, kl=0.1),
        *both(CURVE, "Q4_K_M", 11.0, 11.0, bits_per_weight=5.5, kl=0.001),
        *both(CURVE, "5.0 bits", 10.2, 10.2, bits_per_weight=5.0, kl=0.009),
        *both(CURVE, "4.5 bits", 10.9, 11.1, bits_per_weight=5.0, kl=0.02),
    ]
    found = verdicts(records(tmp_path, *turns))
    assert of(found, "5.0 bits: KL") == "met" and of(found, "4.5 bits: KL") == "missed"
    assert of(found, "4.5 bits: perplexity") == "missed" and of(found, "6.0 bits: KL") == "not measured"


def test_the_report_names_figures_failures_and_what_is_missing(tmp_path: Path) -> None:
    found = records(tmp_path, *both(SMOOTH, "smooth_quant", 10.1, 10.15))
    failure = {"kind": "failure", "model": "demo", "case": NARROW, "side": "AutoAWQ", "error": "skipped: no"}
    found.add(failure)
    text = write_report(found, tmp_path)
    assert "| smooth_quant | 4.25 | 10.100 (+1.0%) | 0.1000 | 1.000 | 10.150 (+1.5%)" in text
    assert "- demo, group 64, AutoAWQ: skipped: no" in text and "group 64: AutoAWQ (twin)" in text
    assert "group 64: llm-compressor AWQ (demo, twin)" in text
    assert (tmp_path / "chart.svg").read_text().startswith("<svg")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_into(page, text, tmp_path / "chart.svg")
    assert "old" not in page.read_text() and page.read_text().endswith(f"{END}\nafter\n")
    with pytest.raises(ValueError, match="no place for results"):
        write_into(tmp_path / "results.md", text, tmp_path / "chart.svg")


def test_the_chart_has_a_place_for_every_point(tmp_path: Path) -> None:
    turns = both(CURVE, "Q4_0", 11.0, 11.0, bits_per_weight=4.5, kl=0.1)
    assert chart(Results(records(tmp_path, *turns))).count("<circle") == 2


def test_seven_billion_parameters_by_hand() -> None:
    layer = 4 * 4096 * 4096 + 3 * 4096 * 11_008
    ends = 2 * 32_000 * 4096
    norms = 65 * 4096 * 2
    bits = 32 * layer * (4 + 20 / 128) + ends * (8 + 16 / 128)
    wide = (32 * layer + ends) * 2 + norms
    assert share_of_float16()["on disk"] == pytest.approx((bits / 8 + norms) / wide)
    assert share_of_float16()["in memory"] < 0.30


def test_sides_have_names_of_their_own() -> None:
    keys = [(side.case, side.name) for side in SIDES]
    assert len(keys) == len(set(keys))


class Letters:
    """A tokenizer of single characters."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def test_held_out_text_is_in_no_calibration() -> None:
    windows = {
        kind: [tuple(w) for w in make(Letters(), 200, 64)]
        for kind, make in (("calibration", calibration), ("held out", held_out))  # type: ignore[arg-type]
    }
    assert not set(windows["calibration"]) & set(windows["held out"])
    again = [tuple(w) for w in calibration(Letters(), 100, 64)]  # type: ignore[arg-type]
    assert again == windows["calibration"][:100]
    with pytest.raises(ValueError, match="were asked for"):
        calibration(Letters(), 10**7, 64)  # type: ignore[arg-type]


def test_a_command_is_measured_and_ended(tmp_path: Path) -> None:
    busy = "import sys; x = bytearray(80 << 20); print('said'); print('noise', file=sys.stderr); sys.exit(3)"
    ended = spawn([sys.executable, "-c", busy], tmp_path / "log.txt", 60)
    assert ended.status == 3 and ended.output == "said\n" and ended.peak_mb > 80
    assert (tmp_path / "log.txt").read_text() == "noise\nsaid\n"
    slow = spawn([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log.txt", 0.3)
    assert slow.status is None and slow.seconds < 30


def test_a_rival_that_is_not_there_is_named(tmp_path: Path) -> None:
    models = {"demo": tmp_path}
    shop = Workshop(tmp_path, models, {"gptqmodel": {"error": "no wheel fits"}}, 1, 16, 60)
    with pytest.raises(MakeError, match="skipped: gptqmodel: no wheel fits"):
        shop.make(Side(NARROW, "x", "rival", package="gptqmodel"), "demo")
    with pytest.raises(MakeError, match=r"skipped: llama.cpp: not installed \(benchmarks/lite/setup.py"):
        shop.make(Side(CURVE, "Q4_0", "llama.cpp", {"kind": "Q4_0"}), "demo")


def test_answers() -> None:
    assert version_of('noise\n{"version": "x 1"}\n') == "x 1"
    assert version_of("") == version_of("[1]") == version_of("no JSON") == ""
    assert last_line("a\n\n  b  \n\n") == "b" and last_line("") == "no message"
