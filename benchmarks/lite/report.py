"""The tables of a run as Markdown and JSON, and its chart. Computes nothing: `results` and `targets` do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from measure.records import Records

from lite.chart import chart
from lite.results import Results
from lite.sides import CASES, CURVE, MODELS, NARROW, SIDES, SMOOTH, WIDE, Side
from lite.targets import targets

BEGIN, END = "<!-- results: bench_lite.py --docs -->", "<!-- end of results -->"
STUDIES = ("samples", "length", "group", "text")
_TITLES = {
    WIDE: "4 bits, groups of 128",
    NARROW: "4 bits, groups of 64, beside other quantisers (which refuse 128 for inputs of 576)",
    CURVE: "Bits for each weight: ours on request, and llama.cpp's kinds",
    SMOOTH: "8-bit weights and activations",
    "samples": "Samples of 256 tokens",
    "length": "Length of a sample, 32,768 tokens in all",
    "group": "Group size",
    "text": "Calibration text",
}


def write_report(records: Records, out: Path) -> str:
    """Writes results.md, results.json and chart.svg into `out`; the Markdown is returned."""
    results = Results(records)
    parts = [_head(records), _targets(results), *(_table(results, case) for case in CASES[1:])]
    text = "\n\n".join(part for part in [*parts, _failures(results)] if part)
    out.mkdir(parents=True, exist_ok=True)
    plain = {"targets": [_plain(t) for t in targets(results)], "records": records.all}
    for name, content in (
        ("results.md", text + "\n"),
        ("results.json", json.dumps(plain, indent=1) + "\n"),
        ("chart.svg", chart(results)),
    ):
        partial = out / f"{name}.partial"
        partial.write_text(content)
        partial.replace(out / name)
    return text


def write_into(page: Path, text: str, picture: Path) -> None:
    """Puts the results between the page's marks, and the chart beside it. ValueError without marks."""
    before, mark, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"{page} has no place for results: {BEGIN} ... {END}")
    place = page.with_name(f"{page.stem}.svg")
    place.write_text(picture.read_text())
    image = f"![KL divergence over bits for each weight, ours and llama.cpp's]({place.name})"
    partial = page.with_name(page.name + ".partial")
    partial.write_text(f"{before}{BEGIN}\n\n{text}\n\n{image}\n\n{END}{after}")
    partial.replace(page)


def _head(records: Records) -> str:
    runs = records.of_kind("run")
    if not runs:
        return ""
    last = runs[-1]
    said = (
        f"{last['date']}, {last['processor']}, {last['threads']} threads; calibration {last['samples']} x"
        f" {last['length']} tokens unless a table says otherwise, {last['positions']} held-out positions."
    )
    return f"{said} {last.get('note', '')}".rstrip()


def _targets(results: Results) -> str:
    lines = ["| target (the worse of both models) | bound | measured | |", "|---|---|---|---|"]
    for t in targets(results):
        value = "" if t.value is None else f"{t.value:.3f}"
        lines.append(f"| {t.what} | <= {t.bound} | {value} | {t.verdict} |")
    return "\n".join(lines)


def _table(results: Results, case: str) -> str:
    """For each side perplexity and KL in each model, then what making it took."""
    models = [model for model in results.models() if results.sides(model, case)]
    sides = list(dict.fromkeys(name for model in models for name in results.sides(model, case)))
    if not sides:
        return ""
    columns = [f"{model}: {what}" for model in models for what in ("perplexity", "KL", "99 %")]
    lines = [
        f"### {_TITLES[case]}",
        "",
        f"| | bits | {' | '.join(columns)} | minutes (CPU) | MB | peak MB |",
        "|---" * (len(columns) + 5) + "|",
    ]
    if "original" in {side.name for side in SIDES if side.case == "original"}:
        cells = [cell for model in models for cell in _cells(results, model, "original", "original")]
        lines.append(f"| original | 16 | {' | '.join(cells)} | | | |")
    for name in sides:
        cells = [cell for model in models for cell in _cells(results, model, case, name)]
        lines.append(
            f"| {name} | {' | '.join([_bits(results, case, name), *cells])} | {_cost(results, case, name)} |"
        )
    return "\n".join(lines)


def _cells(results: Results, model: str, case: str, name: str) -> list[str]:
    found = results.get(model, case, name)
    if found is None:
        return ["", "", ""]
    increase = results.increase(model, case, name) or 0.0
    return [f"{found['perplexity']:.3f} ({increase:+.1%})", f"{found['kl']:.4f}", f"{found['kl_p99']:.3f}"]


def _bits(results: Results, case: str, name: str) -> str:
    return next((f"{f['bits_per_weight']:.2f}" for f in _found(results, case, name)), "")


def _cost(results: Results, case: str, name: str) -> str:
    """Minutes, CPU minutes, megabytes of files and most memory, of the first model that has them."""
    for found in _found(results, case, name):
        minutes, cpu = found["seconds"] / 60, found["cpu_seconds"] / 60
        return f"{minutes:.1f} ({cpu:.1f}) | {found['size_mb']:.0f} | {found['peak_mb']:.0f}"
    return " | | "


def _found(results: Results, case: str, name: str) -> list[dict[str, Any]]:
    return [found for model in MODELS if (found := results.get(model, case, name))]


def _failures(results: Results) -> str:
    lines = [f"- {model}, {case}, {side}: {error}" for (model, case, side), error in results.failures.items()]
    missing = [
        f"{side.case}: {side.name} ({', '.join(m)})" for side in SIDES if (m := _missing(results, side))
    ]
    if missing:
        lines.append(f"- not measured in this run: {'; '.join(missing)}")
    return "\n".join(["Without a figure:", "", *lines]) if lines else ""


def _missing(results: Results, side: Side) -> list[str]:
    keys = [(model, side.case, side.name) for model in side.models]
    return [key[0] for key in keys if results.get(*key) is None and key not in results.failures]


def _plain(target: Any) -> dict[str, Any]:
    return {"what": target.what, "bound": target.bound, "value": target.value, "verdict": target.verdict}
