"""What a report holds: plain data, from which terminal table, JSON and page are made."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lmdeploy.lite.workspace import REPORT_FILES
from lmdeploy.quality.behaviours import Answer, BehaviourFigures
from lmdeploy.quality.items import Item
from lmdeploy.quality.judge import Judgement
from lmdeploy.quality.layers import LayerFigures
from lmdeploy.quant.scheme import InputRounding

OVERALL = "all"


@dataclass(frozen=True, slots=True)
class TextFigures:
    """Of one domain or of all. tokens: predicted ones; bytes: of the text they stand for. perplexity: per
    token. bits_per_byte: comparable between tokenizers. KL in nats, from the original; None: not comparable
    (or the original itself)."""

    tokens: int
    bytes: int
    perplexity: float
    bits_per_byte: float
    mean_kl: float | None = None
    p99_kl: float | None = None
    top1: float | None = None


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """disk_bytes: of all its weight files. memory_bytes: of weights in the engine that runs it here; None,
    and why in memory_refused. bits_per_weight: over the matrices of all layers, as stored. inputs: what its
    files say is done to what matrices are fed. made: what the
    quantisation says of itself. *_refused: why something was not measured, "" where it was or was not asked.
    """

    name: str
    path: str
    format: str
    disk_bytes: int
    bits_per_weight: float
    inputs: InputRounding
    memory_bytes: int | None
    memory_refused: str
    engine: str
    texts: Mapping[str, TextFigures]
    kl_refused: str = ""
    layers: Sequence[LayerFigures] = ()
    layers_refused: str = ""
    behaviours: BehaviourFigures | None = None
    behaviours_refused: str = ""
    judged: Judgement | None = None
    made: Mapping[str, Any] | None = None
    warnings: Sequence[str] = ()

    @property
    def overall(self) -> TextFigures:
        return self.texts[OVERALL]


@dataclass(frozen=True, slots=True)
class Report:
    """models: the original first. settings: what was measured with, for people and for repeating it.
    answers: of each model (None: not asked), parallel to `items`."""

    models: Sequence[ModelFigures]
    settings: Mapping[str, Any]
    items: Sequence[Item] = ()
    answers: Sequence[Sequence[Answer] | None] = ()

    @property
    def original(self) -> ModelFigures:
        return self.models[0]

    def as_json(self) -> dict[str, Any]:
        """JSON values only; key names are those of the classes here."""
        asked = [
            {
                **asdict(item),
                "answers": {
                    model.name: asdict(answers[i])
                    for model, answers in zip(self.models, self.answers, strict=True)
                    if answers is not None
                },
            }
            for i, item in enumerate(self.items)
        ]
        return {
            "settings": dict(self.settings),
            "models": [asdict(model) for model in self.models],
            "items": asked,
        }

    def table(self) -> None:
        """Print it to standard output."""
        from lmdeploy.quality.table import show

        show(self)

    def write(self, directory: str | Path) -> tuple[Path, Path]:
        """The report as JSON and as one HTML page; each file is whole or not there."""
        from lmdeploy.quality.page import page

        folder = Path(directory).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.as_json(), ensure_ascii=False, indent=1, allow_nan=False)
        values, html = (folder / name for name in REPORT_FILES)
        return _put(values, text + "\n"), _put(html, page(self))


def _put(path: Path, text: str) -> Path:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8", errors="replace")
    partial.replace(path)
    return path


def times(value: float, original: float) -> str:
    """A factor, for people."""
    return f"{value / original:.3f} x" if original else "-"


def losses(original: TextFigures, other: TextFigures) -> dict[str, float]:
    """How much worse, by measure: KL in nats, and the increase of bits per byte."""
    found = {"bits per byte": other.bits_per_byte - original.bits_per_byte}
    return found if other.mean_kl is None else {"KL": other.mean_kl, **found}


_FLOORS = {"KL": 1e-3, "bits per byte": 5e-3}  # below these differences are noise


def uneven_domains(original: ModelFigures, other: ModelFigures) -> list[str]:
    """A line for each domain that loses more than twice what domains lose on the mean."""
    names = [name for name in other.texts if name != OVERALL]
    found = []
    by_domain = {name: losses(original.texts[name], other.texts[name]) for name in names}
    for measure, floor in _FLOORS.items():
        values = {n: one[measure] for n, one in by_domain.items() if measure in one}
        mean = sum(values.values()) / len(values) if values else 0.0
        for name, value in values.items():
            if value > floor and value > 2 * mean > 0:
                found.append(
                    f"{name}: loses {value / mean:.1f} x the mean of all domains ({measure} {value:.4f},"
                    f" mean {mean:.4f})"
                )
    return found
