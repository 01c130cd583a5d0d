"""Small charts as SVG text for the report: bars side by side and lines.

The page says which colour number a name has, the same in every chart; the colours themselves are its style.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 720, 260, 64, 34, 12


def bars(
    title: str,
    labels: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    colours: Mapping[str, int],
) -> str:
    """Of each label one bar for each series; None is left out."""
    top = _nice(max((v for values in series.values() for v in values if v is not None), default=0.0))
    parts = [_axis([0, top / 2, top], lambda v: _y(v / top))]
    slot = (_WIDTH - _LEFT) / max(len(labels), 1)
    width = min(0.8 * slot / max(len(series), 1), 48)
    for i, label in enumerate(labels):
        middle = _LEFT + (i + 0.5) * slot
        parts.append(_text(middle, _HEIGHT - _BOTTOM + 16, label, "middle"))
        for j, (name, values) in enumerate(series.items()):
            value = values[i]
            if value is None:
                continue
            x, y = middle + (j - len(series) / 2) * width, _y(value / top)
            height = _HEIGHT - _BOTTOM - y
            told = escape(f"{name}, {label}: {value:.4g}")
            parts.append(
                f'<rect class="c{colours[name]}" x="{x:.1f}" y="{y:.1f}" width="{width - 2:.1f}"'
                f' height="{max(height, 0.5):.1f}"><title>{told}</title></rect>'
            )
    return _framed(title, parts, {name: colours[name] for name in series})


def lines(title: str, series: Mapping[str, Sequence[float]], colours: Mapping[str, int]) -> str:
    """Values by index on a logarithmic scale; values of 0 are drawn at its foot."""
    values = [v for one in series.values() for v in one if v > 0]
    low = math.floor(math.log10(min(values))) if values else -1
    high = max(math.ceil(math.log10(max(values))) if values else 0, low + 1)
    parts = [_axis([10.0**e for e in range(low, high + 1)], lambda v: _y(_place(v, low, high)))]
    count = max((len(one) for one in series.values()), default=1)
    step = (_WIDTH - _LEFT - 16) / max(count - 1, 1)
    for i in range(0, count, max(1, count // 12)):
        parts.append(_text(_LEFT + i * step, _HEIGHT - _BOTTOM + 16, str(i), "middle"))
    for name, one in series.items():
        points = [(_LEFT + i * step, _y(_place(v, low, high))) for i, v in enumerate(one)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline class="l{colours[name]}" points="{path}"/>')
        for i, ((x, y), v) in enumerate(zip(points, one, strict=True)):
            told = escape(f"{name}, layer {i}: {v:.4g}")
            dot = f'<circle class="c{colours[name]}" cx="{x:.1f}" cy="{y:.1f}" r="3">'
            parts.append(f"{dot}<title>{told}</title></circle>")
    return _framed(title, parts, {name: colours[name] for name in series})


def _place(value: float, low: int, high: int) -> float:
    return (math.log10(value) - low) / (high - low) if value > 0 else 0.0


def _y(share: float) -> float:
    return _TOP + (1 - min(max(share, 0.0), 1.0)) * (_HEIGHT - _BOTTOM - _TOP)


def _nice(value: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    if value <= 0 or not math.isfinite(value):
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next((f * power for f in (1.0, 2.0, 5.0) if value <= f * power), 10 * power)


def _axis(ticks: Sequence[float], y: Callable[[float], float]) -> str:
    return "".join(
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>'
        + _text(_LEFT - 6, y(v) + 4, f"{v:.3g}", "end")
        for v in ticks
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    shown = text if len(text) <= 18 else text[:17] + "…"
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(shown)}</text>'


def _framed(title: str, parts: Sequence[str], colours: Mapping[str, int]) -> str:
    legend = "".join(f'<span class="key k{i}">{escape(name)}</span>' for name, i in colours.items())
    return (
        f'<figure><figcaption>{escape(title)}<br>{legend}</figcaption><div class="wide">'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">'
        + "".join(parts)
        + "</svg></div></figure>"
    )
