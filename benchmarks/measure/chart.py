"""One picture of all rows: for each, a bar per side, as multiples of the fastest peer. Self-contained SVG."""

from __future__ import annotations

from html import escape

from measure.results import Results
from measure.rows import OURS, Case

_BAR, _GAP, _LABEL, _WIDTH, _HEAD = 14, 22, 190, 520, 40
_OURS = {"fast": "#1b7f5c", "auto": "#3fae86", "exact": "#8fd3ba"}
_PEER = "#9a9aa5"


def chart(results: Results) -> str:
    rows = [(model, case, _bars(results, model, case)) for model, case in results.rows()]
    most = max((value for _, _, bars in rows for _, value, _ in bars), default=1.0)
    scale = (_WIDTH - 60) / most
    parts, y = [], _HEAD
    for model, case, bars in rows:
        parts.append(_text(8, y + 10, f"{model} {case.name}", weight="bold"))
        for side, value, rate in bars:
            y += _BAR
            width = max(value * scale, 1)
            parts.append(_text(16, y + 10, side))
            colour = _OURS.get(side.removeprefix(f"{OURS} "), _PEER) if side.startswith(OURS) else _PEER
            parts.append(
                f'<rect x="{_LABEL}" y="{y + 1}" width="{width:.1f}" height="{_BAR - 3}" fill="{colour}"/>'
            )
            parts.append(_text(_LABEL + width + 4, y + 10, f"{value:.2f}  ({rate:.0f} tokens/s)"))
        y += _GAP
    if rows:
        x = _LABEL + scale
        line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_HEAD}" y2="{y}" stroke="#444" stroke-dasharray="3 3"/>'
        parts.insert(0, line)
    size = f'width="{_LABEL + _WIDTH + 60}" height="{y + 8}"'
    title = _text(
        8, 20, "Speed as a multiple of the fastest peer (dashed line), same run", weight="bold", size=13
    )
    style = 'font-family="sans-serif" style="background:#fff"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{title}\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _bars(results: Results, model: str, case: Case) -> list[tuple[str, float, float]]:
    """(side, multiple of the fastest peer or of the fastest side, tokens a second), ours first."""
    sides = sorted(results.sides(model, case), key=lambda s: not s.startswith(f"{OURS} "))
    rates = {s: figure.value for s in sides if (figure := results.figure(model, case, s)) is not None}
    peer = results.fastest_peer(model, case)
    unit = rates[peer] if peer else max(rates.values())
    return [(side, value / unit, value) for side, value in rates.items()]


def _text(x: float, y: float, text: str, weight: str = "normal", size: int = 11) -> str:
    place = f'x="{x:.1f}" y="{y}" font-size="{size}" font-weight="{weight}" fill="#222"'
    return f"<text {place}>{escape(text)}</text>"
