"""One picture: KL divergence over bits for each weight, a panel for each model. Self-contained SVG."""

from __future__ import annotations

import math
from html import escape

from lite.results import Results
from lite.sides import CURVE, KINDS, TARGET_BITS

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 330, 250, 60, 50, 80
_OURS, _THEIRS, _MATRIX = "#1b7f5c", "#9a9aa5", "#c08a3e"
_SERIES = (
    ("ours", _OURS, tuple(f"{bits} bits" for bits in TARGET_BITS)),
    ("llama.cpp", _THEIRS, KINDS),
    ("llama.cpp with imatrix", _MATRIX, tuple(f"{kind} with imatrix" for kind in KINDS)),
)
Point = tuple[float, float, str]  # bits, KL, name


def chart(results: Results) -> str:
    models = results.models()
    width = _LEFT + len(models) * (_WIDTH + _GAP)
    parts = [
        _text(8, 20, "KL divergence to the original over bits for each weight (logarithmic)", "bold", 13)
    ]
    parts += [_text(_LEFT + 170 * i, 40, name, colour=colour) for i, (name, colour, _) in enumerate(_SERIES)]
    for place, model in enumerate(models):
        parts += _panel(results, model, _LEFT + place * (_WIDTH + _GAP))
    size = f'width="{max(width, 560)}" height="{_TOP + _HEIGHT + 60}"'
    style = 'font-family="sans-serif" style="background:#fff"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{body}\n</svg>\n'


def _panel(results: Results, model: str, left: float) -> list[str]:
    series = [(colour, _points(results, model, names)) for _, colour, names in _SERIES]
    every = [point for _, points in series for point in points]
    parts = [_text(left, _TOP + _HEIGHT + 40, f"{model}: bits for each weight", "bold")]
    if not every:
        return parts
    low, high = min(p[0] for p in every), max(p[0] for p in every)
    logs = [math.log10(p[1]) for p in every]
    bottom, top = math.floor(min(logs)), math.ceil(max(logs))

    def at(bits: float, kl: float) -> tuple[float, float]:
        across = (bits - low) / ((high - low) or 1) * _WIDTH
        up = (math.log10(kl) - bottom) / ((top - bottom) or 1) * _HEIGHT
        return left + across, _TOP + _HEIGHT - up

    for power in range(bottom, top + 1):
        _, y = at(low, 10.0**power)
        parts.append(_line([(left, y), (left + _WIDTH, y)], "#ddd"))
        parts.append(_text(left - 44, y + 4, f"{10.0**power:g}"))
    for bits in range(math.ceil(low), math.floor(high) + 1):
        parts.append(_text(at(bits, 10.0**bottom)[0] - 3, _TOP + _HEIGHT + 16, str(bits)))
    for colour, points in series:
        places = [at(bits, kl) for bits, kl, _ in points]
        parts.append(_line(places, colour))
        for (x, y), (_, _, name) in zip(places, points, strict=True):
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>')
            parts.append(_text(x + 5, y - 5, name.removesuffix(" with imatrix"), colour=colour, size=9))
    return parts


def _points(results: Results, model: str, names: tuple[str, ...]) -> list[Point]:
    found = ((results.get(model, CURVE, name), name) for name in names)
    return sorted((f["bits_per_weight"], f["kl"], name) for f, name in found if f is not None and f["kl"] > 0)


def _line(places: list[tuple[float, float]], colour: str) -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline points="{points}" fill="none" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, weight: str = "normal", size: int = 11, colour: str = "#222") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" fill="{colour}"'
    return f"<text {place}>{escape(text)}</text>"
