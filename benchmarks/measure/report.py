"""The tables of a run as Markdown and JSON, and its chart. Computes nothing: `results` and `targets` do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from measure.chart import chart
from measure.extras import last_extras, targets_of_extras
from measure.page import write_between
from measure.records import Records
from measure.results import Figure, Ratio, Results, variants_of
from measure.rows import MODELS, OURS, Case
from measure.statistics import median
from measure.targets import Target, targets


def write_report(records: Records, out: Path) -> str:
    """Writes results.md, results.json and chart.svg into `out`; the Markdown is returned."""
    results = Results(records)
    parts = (_head(records, results), *_tables(records, results), _failures(results), *_extras(records))
    text = "\n\n".join(part for part in parts if part)
    out.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("results.md", text + "\n"),
        ("results.json", json.dumps(_plain(records, results), indent=1) + "\n"),
        ("chart.svg", chart(results)),
    ):
        partial = out / f"{name}.partial"
        partial.write_text(content)
        partial.replace(out / name)
    return text


BEGIN, END = "<!-- results: bench_native.py --docs -->", "<!-- end of results -->"


def write_into(page: Path, text: str, picture: Path) -> None:
    """Puts the results between the page's marks, and the chart beside it. ValueError without marks."""
    place = page.with_name(f"{page.stem}.svg")
    image = f"![speed of every row beside the fastest peer]({place.name})"
    write_between(page, BEGIN, END, f"{text}\n\n{image}")
    place.write_text(picture.read_text())


def _head(records: Records, results: Results) -> str:
    runs = records.of_kind("run")
    ours = [r for turns in results.turns.values() for r in turns if "read" in r]
    lines = []
    if runs:
        last = runs[-1]
        lines.append(
            f"{last['date']}, {last['processor']}, {last['threads']} threads. {last.get('note', '')}".rstrip()
        )
    if ours:
        read, peak, wide = (
            median([r[name] for r in ours]) / 1e9 for name in ("read", "int8_peak", "float_peak")
        )
        low, high = (f(r["read"] for r in ours) / 1e9 for f in (min, max))
        lines.append(
            f"Limits, median of {len(ours)} turns: read {read:.1f} GB/s ({low:.1f} to {high:.1f}),"
            f" int8 dot product {peak:.0f} GOP/s, 16-bit dot product {wide:.0f} GFLOP/s."
        )
    everyone = [r["others"] for turns in results.turns.values() for r in turns]
    if everyone:
        shares = f"{median(everyone):.1%} of the CPU in the median turn, {max(everyone):.1%} in the worst"
        lines.append(f"Others took {shares}.")
    versions = {side.split()[0]: t[-1].get("version", "") for (_, _, side), t in results.turns.items()}
    lines.append("Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".")
    return "\n".join(lines)


def _tables(records: Records, results: Results) -> list[str]:
    found = [*targets(results), *targets_of_extras(records)]
    return [_target_table(found), *(_speed_table(results, m) for m in MODELS if _has(results, m))]


def _has(results: Results, model: str) -> bool:
    return any(m == model for m, _ in results.rows())


def _target_table(found: list[Target]) -> str:
    lines = ["| target | bound | measured (90 % interval) | |", "|---|---|---|---|"]
    for t in found:
        value = "" if t.value is None else f"{t.value:.3g}"
        if t.interval is not None:
            value += f" ({t.interval[0]:.3g} to {t.interval[1]:.3g})"
        lines.append(f"| {t.what} | {'>=' if t.at_least else '<='} {t.bound} | {value} | {t.verdict} |")
    return "\n".join(lines)


def _speed_table(results: Results, model: str) -> str:
    """A line for each side: tokens a second, and spread where it is more than a twentieth."""
    cases = [case for m, case in results.rows() if m == model]
    sides = list(dict.fromkeys(side for case in cases for side in results.sides(model, case)))
    lines = [
        f"| {model}, tokens/s | " + " | ".join(c.name for c in cases) + " |",
        "|---" * (len(cases) + 1) + "|",
    ]
    for side in sorted(sides, key=lambda s: not s.startswith(f"{OURS} ")):
        cells = [_cell(results.figure(model, case, side)) for case in cases]
        lines.append(f"| {side} | " + " | ".join(cells) + " |")
    for accuracy in variants_of(results, model):
        cells = [_ratio_cell(results, model, case, accuracy) for case in cases]
        lines.append(f"| {accuracy} / fastest peer | " + " | ".join(cells) + " |")
    for accuracy in variants_of(results, model):
        limits = [results.to_limit(model, case, accuracy) for case in cases]
        cells = ["" if r is None else f"{r.value:.2f}" for r in limits]
        lines.append(f"| {accuracy} to the limit | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return ""
    digits = 0 if figure.value >= 100 else 1
    noise = f" ±{figure.spread / 2:.0%}" if figure.rounds > 1 and figure.spread > 0.05 else ""
    return f"{figure.value:.{digits}f}{noise}"


def _ratio_cell(results: Results, model: str, case: Case, accuracy: str) -> str:
    ratio: Ratio | None = results.to_peer(model, case, accuracy)
    if ratio is None:
        return ""
    bounds = f" ({ratio.low:.2f}-{ratio.high:.2f})" if ratio.pairs > 1 else ""
    return f"{ratio.value:.2f}{bounds}, {results.fastest_peer(model, case)}"


def _failures(results: Results) -> str:
    lines = [f"- {model} {case} {side}: {error}" for (model, case, side), error in results.failures.items()]
    return "\n".join(["Without a figure:", *lines]) if lines else ""


def _extras(records: Records) -> list[str]:
    """What the other benchmarks printed, or why they did not."""
    parts = []
    for record in last_extras(records).values():
        said = record.get("text") or f"failed: {record['error']}"
        parts.append(f"### {record['name']}\n\n`{record['command']}`\n\n{said.strip()}")
    return parts


def _plain(records: Records, results: Results) -> dict[str, Any]:
    rows = []
    for (model, case, side), turns in results.turns.items():
        rows.append({"model": model, "case": case, "side": side, "turns": turns})
    judged = [
        {"what": t.what, "bound": t.bound, "at_least": t.at_least, "value": t.value, "verdict": t.verdict}
        for t in [*targets(results), *targets_of_extras(records)]
    ]
    kept = {kind: records.of_kind(kind) for kind in ("run", "failure", "extra")}
    return {**kept, "targets": judged, "rows": rows}
