"""The report on a terminal."""

from __future__ import annotations

from typing import Any

from lmdeploy.quality.figures import OVERALL, ModelFigures, Report, times

_WORST_LAYERS = 3
_WIDTH = 120  # of a file or pipe


def show(report: Report) -> None:
    """Print all tables to standard output."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    settings = report.settings
    for rows in tables(report):
        console.print(_grid(*rows))
    for model in report.models[1:]:
        for line in remarks(model):
            console.print(f"{model.name}: {line}", markup=False, soft_wrap=True)
    windows = ", ".join(f"{name} {count}" for name, count in settings["windows"].items())
    console.print(
        f"Measured on {settings['text']} (windows: {windows}; {report.original.overall.tokens} tokens),"
        f" in {settings['seconds']:.0f} s.",
        markup=False,
        soft_wrap=True,
    )


WORDS = ("figure", "model", "domain", "group", "matrix", "kind")  # heads of columns that hold words
Table = tuple[str, list[str], list[list[str]]]  # title, heads, rows


def tables(report: Report) -> list[Table]:
    """The figures in words, for terminal and page alike."""
    found = [_models(report), _domains(report)]
    if any(model.behaviours for model in report.models):
        found += [_groups(report), _faults(report)]
    return found


def remarks(model: ModelFigures) -> list[str]:
    """What is to be said of a model beside its figures, a line each."""
    found = [f"warning: {line}" for line in model.warnings]
    if model.kl_refused:
        found.append(f"KL and top-1 are not given: {model.kl_refused}")
    if model.layers_refused:
        found.append(f"errors of layers are not given: {model.layers_refused}")
    if model.memory_refused:
        found.append(f"size in memory is not given: {model.memory_refused}")
    if model.behaviours_refused:
        found.append(f"answers are not given: {model.behaviours_refused}")
    if model.layers:
        worst = sorted(model.layers, key=lambda layer: -layer.own)[:_WORST_LAYERS]
        shown = ", ".join(f"{layer.index} ({layer.own:.2e})" for layer in worst)
        found.append(f"layers with the largest error: {shown}; at the end {model.layers[-1].carried:.2e}")
    if model.judged is not None:
        found.append(judged(model))
    return found


def judged(model: ModelFigures) -> str:
    """The judge's verdicts in one line."""
    j = model.judged
    assert j is not None
    failures = "; ".join(f"{reason} ({count})" for reason, count in j.failures.items())
    return (
        f"judge {j.model or '(no answer)'}: original better {j.count('original')}, this one better"
        f" {j.count('other')}, equal {j.count('tie')}, by order of the answers {j.by_order},"
        f" failed {sum(j.failures.values())}{f': {failures}' if failures else ''}, not asked {j.not_asked}"
    )


def _models(report: Report) -> Table:
    """One column for each model."""
    first = report.original
    heads = ["figure", *(model.name for model in report.models)]
    names = (
        "format",
        "bits per weight (layers)",
        "size on disk",
        "weights in memory",
        "perplexity",
        "bits per byte of text",
        "mean KL, nats",
        "99th percentile of KL",
        "same likeliest token",
    )
    columns = [_column(model, first) for model in report.models]
    return "Models", heads, [[name, *values] for name, *values in zip(names, *columns, strict=True)]


def _column(model: ModelFigures, first: ModelFigures) -> list[str]:
    text, before = model.overall, first.overall
    own = "its own tokens" if model.kl_refused else times(text.perplexity, before.perplexity)
    memory = "-"
    if model.memory_bytes is not None:
        memory = f"{_mb(model.memory_bytes)} ({times(model.memory_bytes, first.memory_bytes or 0)})"
    return [
        model.format + (", inputs in 8 bits" if model.inputs == "bytes" else ""),
        f"{model.bits_per_weight:.2f}",
        f"{_mb(model.disk_bytes)} ({times(model.disk_bytes, first.disk_bytes)})",
        memory,
        f"{text.perplexity:.3f} ({own})",
        f"{text.bits_per_byte:.4f}",
        _number(text.mean_kl),
        _number(text.p99_kl),
        _percent(text.top1),
    ]


def _domains(report: Report) -> Table:
    rows = []
    for domain in report.original.texts:
        if domain == OVERALL:
            continue
        for model in report.models:
            text, before = model.texts[domain], report.original.texts[domain]
            ratio = "" if model.kl_refused else f" ({times(text.perplexity, before.perplexity)})"
            rows.append(
                [
                    domain,
                    model.name,
                    str(text.tokens),
                    f"{text.perplexity:.3f}{ratio}",
                    f"{text.bits_per_byte:.4f}",
                    _number(text.mean_kl),
                    _number(text.p99_kl),
                    _percent(text.top1),
                ]
            )
    heads = ["domain", "model", "tokens", "perplexity", "bits/byte", "KL", "KL p99", "top-1"]
    return "Held-out text by domain", heads, rows


def _groups(report: Report) -> Table:
    rows = []
    asked = [model for model in report.models if model.behaviours]
    for group in asked[0].behaviours.groups if asked[0].behaviours else []:
        for model in asked:
            assert model.behaviours is not None
            one = model.behaviours.groups[group]
            rows.append([group, model.name, f"{one.passed} of {one.scored}", f"{one.same} of {one.items}"])
    return "Answers at temperature 0", ["group", "model", "right", "as the original"], rows


def _faults(report: Report) -> Table:
    rows = []
    for model in report.models:
        b = model.behaviours
        if b is not None:
            rows.append(
                [
                    model.name,
                    f"{b.invalid_json} of {b.json}",
                    f"{b.invalid_code} of {b.code}",
                    f"{b.broken_chains} of {b.chains}",
                    f"{b.loops} of {b.items}",
                    f"{b.sampled_loops} of {b.items}",
                    f"{b.unfinished} of {b.items}",
                    f"{b.mean_tokens:.0f}",
                ]
            )
    heads = ["model", "invalid JSON", "invalid code", "broken chains", "loops at 0", "loops at 0.7"]
    return "What breaks", [*heads, "cut off", "mean tokens"], rows


def _grid(title: str, heads: list[str], rows: list[list[str]]) -> Any:
    from rich import box
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for head in heads:
        words = head in WORDS
        grid.add_column(head, justify="left" if words else "right", no_wrap=not words, overflow="fold")
    for row in rows:
        grid.add_row(*(Text(cell) for cell in row))
    return grid


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if value >= 1e-4 or value == 0 else f"{value:.1e}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
