"""The report as one HTML page that needs nothing else: no script, no font, no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lmdeploy.quality.behaviours import Answer
from lmdeploy.quality.charts import bars, lines
from lmdeploy.quality.figures import OVERALL, ModelFigures, Report
from lmdeploy.quality.table import WORDS, Table, remarks, tables

_STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1c2024;--soft:#60646c;--line:#d9d9e0;--box:#f6f6f8;
--0:#3b6fd4;--1:#d9730d;--2:#2a9d5c;--3:#a355c9;--4:#c23b4f;--5:#7a7f87}
@media(prefers-color-scheme:dark){:root{--bg:#15171a;--fg:#e4e6e9;--soft:#a0a5ad;--line:#33373d;--box:#1e2125;
--0:#7aa5f5;--1:#f2a35a;--2:#63cf92;--3:#c99be6;--4:#ee8493;--5:#a7acb5}}
body{font:15px/1.5 system-ui,sans-serif;max-width:74rem;margin:2rem auto;padding:0 1rem;background:var(--bg);
color:var(--fg)}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2.2rem}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .7rem;border-bottom:1px solid var(--line);text-align:right;vertical-align:top}
th,td{white-space:nowrap}td.long{white-space:normal;overflow-wrap:anywhere;text-align:left}
th:first-child,td:first-child,.words{text-align:left}th{color:var(--soft);font-weight:600}
figure{margin:1.2rem 0;max-width:46rem}figcaption{color:var(--soft)}
svg{width:100%;min-width:34rem;height:auto;display:block}
svg text{font-size:11px;fill:var(--soft)}.grid{stroke:var(--line)}polyline{fill:none;stroke-width:2}
.key{margin-right:1rem}.key:before{content:"";display:inline-block;width:.7em;height:.7em;margin-right:.35em}
.warn{border-left:4px solid var(--1);padding:.3rem .8rem;background:var(--box)}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(18rem,1fr));gap:.6rem}
.answer{background:var(--box);padding:.5rem .7rem;border-radius:4px;min-width:0}
pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:.3rem 0;font:13px/1.45 ui-monospace,monospace}
details{margin:.35rem 0}summary{cursor:pointer}.soft{color:var(--soft)}
"""
_COLOURS = 6
_QUESTION = 90  # characters of a question in its line
_CLASSES = "".join(
    f".c{i}{{fill:var(--{i})}}.l{i}{{stroke:var(--{i})}}.k{i}:before{{background:var(--{i})}}"
    for i in range(_COLOURS)
)


def page(report: Report) -> str:
    """The whole document."""
    names = ", ".join(model.name for model in report.models[1:])
    title = f"Quality of {names} beside {report.original.name}" if names else f"{report.original.name}"
    body = [
        f"<h1>{escape(title)}</h1>",
        *(_table(*one) for one in tables(report)[:1]),
        *_remarks(report.models),
        *_charts(report),
        *(_table(*one) for one in tables(report)[1:]),
        *(_layers(model) for model in report.models if model.layers),
        _answers(report),
        _settings(report),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}{_CLASSES}</style></head><body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th{_words(name)}>{escape(name)}</th>" for name in heads)
    lines_ = "".join(
        "<tr>"
        + "".join(f"<td{_words(name)}>{escape(cell)}</td>" for name, cell in zip(heads, row, strict=True))
        + "</tr>"
        for row in rows
    )
    return (
        f'<h2>{escape(title)}</h2><div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{lines_}</tbody></table></div>"
    )


def _words(head: str) -> str:
    return ' class="words"' if head in WORDS else ""


def _remarks(models: Sequence[ModelFigures]) -> list[str]:
    return [
        f"<p{' class=warn' if line.startswith('warning') else ''}>{escape(f'{model.name}: {line}')}</p>"
        for model in models[1:]
        for line in remarks(model)
    ]


def _charts(report: Report) -> list[str]:
    found, others = [], report.models[1:]
    colours = {model.name: i % _COLOURS for i, model in enumerate(report.models)}
    domains = [name for name in report.original.texts if name != OVERALL]
    apart = {m.name: [m.texts[d].mean_kl for d in domains] for m in others if not m.kl_refused}
    if apart:
        found.append(bars("Mean KL from the original by domain, nats", domains, apart, colours))
    own = {m.name: [layer.own for layer in m.layers] for m in others if m.layers}
    if own:
        found.append(lines("Error of each layer fed the original's states (relative, squared)", own, colours))
        carried = {m.name: [layer.carried for layer in m.layers] for m in others if m.layers}
        found.append(lines("Error of the states after each layer (relative, squared)", carried, colours))
        sizes = {m.name: [layer.bytes / 1e6 for layer in m.layers] for m in others if m.layers}
        count = len(next(iter(sizes.values())))
        labels = [str(i) if i % max(1, count // 12) == 0 else "" for i in range(count)]
        found.append(bars("Size of each layer in the files, MB", labels, sizes, colours))
    asked = {m.name: m.behaviours.groups for m in report.models if m.behaviours}
    if asked:
        groups = list(next(iter(asked.values())))
        shares = {
            name: [100 * one[g].passed / one[g].scored if one[g].scored else None for g in groups]
            for name, one in asked.items()
        }
        found.append(bars("Right answers, % of those scored by rule", groups, shares, colours))
    return found


def _layers(model: ModelFigures) -> str:
    measured = {m.measured for layer in model.layers for m in layer.matrices}
    heads = ["layer", "matrix", "kind", "bits", "MB", "error"]
    rows: list[list[str]] = []
    for layer in model.layers:
        rows.append([str(layer.index), "", "", "", f"{layer.bytes / 1e6:.2f}", f"{layer.own:.2e}"])
        rows += [
            ["", m.name, m.kind, f"{m.bits_per_weight:.2f}", f"{m.bytes / 1e6:.2f}", f"{m.error:.2e}"]
            for m in layer.matrices
        ]
    said = [
        "A layer's error is that of what it adds to the original's states.",
        "A matrix's error is that of its output over the calibration inputs, as the quantisation measured it."
        if "output" in measured
        else "",
        "A matrix's error is that of its values beside the original's; scales that were moved between"
        " matrices, which change no output, count as error."
        if "weights" in measured
        else "",
        "All are squared and relative.",
    ]
    table: Table = (f"Layers of {model.name}", heads, rows)
    return f"<details><summary>Layers and matrices of {escape(model.name)}</summary>{_table(*table)}<p>" + (
        escape(" ".join(filter(None, said))) + "</p></details>"
    )


def _answers(report: Report) -> str:
    if not report.items:
        return ""
    parts = [
        "<h2>Answers side by side</h2><p>One mark for each model, in the order of the first table:"
        " ✓ right, ✗ wrong, – not scored by a rule, ↻ repeats itself.</p>"
    ]
    for i, item in enumerate(report.items):
        asked = [
            (model, answers[i])
            for model, answers in zip(report.models, report.answers, strict=True)
            if answers is not None
        ]
        differ = len({answer.text for _, answer in asked}) > 1
        verdicts = [
            f"judge: {model.judged.verdicts[item.id]}"
            for model in report.models
            if model.judged and item.id in model.judged.verdicts
        ]
        marks = " ".join(_mark(answer) for _, answer in asked)
        question = " ".join(item.turns[-1].split())
        shown = question if len(question) <= _QUESTION else question[: _QUESTION - 1] + "…"
        told = " · ".join([item.id, marks, *([] if differ else ["same"]), *verdicts, shown])
        before = "".join(_message(m["role"], m["content"]) for m in item.before)
        columns = "".join(_column(model.name, item.turns, answer) for model, answer in asked)
        parts.append(
            f"<details><summary>{escape(told)}</summary>{before}<div class=pair>{columns}</div></details>"
        )
    return "\n".join(parts)


def _mark(answer: Answer) -> str:
    return {True: "✓", False: "✗", None: "–"}[answer.score.passed] + ("↻" if answer.loop else "")


def _column(name: str, turns: Sequence[str], answer: Answer) -> str:
    said = [*answer.earlier, answer.text]
    talk = "".join(_message("user", t) + _message("answer", s) for t, s in zip(turns, said, strict=True))
    faults = [answer.score.reason]
    faults += ["loop at temperature 0"] * answer.loop + ["loop at temperature 0.7"] * answer.sampled_loop
    faults += ["cut off"] * answer.unfinished
    told = "; ".join(filter(None, faults)) or ("right" if answer.score.passed else "")
    return f"<div class=answer><b>{escape(name)}</b> <span class=soft>{escape(told)}</span>{talk}</div>"


def _message(role: str, text: str) -> str:
    return f"<div class=soft>{escape(role)}</div><pre>{escape(text)}</pre>"


def _settings(report: Report) -> str:
    rows = [[str(key), str(value)] for key, value in report.settings.items() if value != ""]
    for model in report.models:
        told = "; ".join(filter(None, [model.path, model.engine, str(model.made or "")]))
        rows.append([model.name, told])
    cells = "".join(
        f'<tr><td>{escape(name)}</td><td class="long">{escape(value)}</td></tr>' for name, value in rows
    )
    return (
        "<h2>How this was measured</h2><p>Perplexity, KL and agreement: float32, every position of every"
        " window. KL is that of a model's next-token distribution from the original's, in nats. Answers come"
        f' from the engine that runs the model here.</p><div class="wide"><table>{cells}</table></div>'
    )
