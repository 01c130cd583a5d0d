"""What is compared: cases, the sides of each, and how a side's model is made. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Maker = Literal["ours", "rival", "llama.cpp", "original"]
MODELS = ("demo", "twin")


@dataclass(frozen=True, slots=True)
class Side:
    """One way to make a model of `case`.

    job: what the process that makes it is told, beside model, samples and place (rivals/job.py,
    ours_worker.py; of llama.cpp the kind, and whether with an importance matrix). samples, length and text
    replace those of the run; no samples: it uses none.
    """

    case: str
    name: str
    maker: Maker
    job: dict[str, Any] = field(default_factory=dict)
    package: str = ""  # of a rival
    models: tuple[str, ...] = MODELS
    samples: int | None = None
    length: int | None = None
    text: str = "matching"

    @property
    def made_of(self) -> list[object]:
        """Sides with equal ones have the same model; as JSON has it."""
        return [self.maker, self.package, self.job, self.samples, self.length, self.text]


PLAIN, AWQ, GPTQ, BEST = "plain rounding", "AWQ", "GPTQ", "AWQ + GPTQ"
METHODS: dict[str, dict[str, Any]] = {
    PLAIN: {"method": "rtn", "clip": False},
    AWQ: {"method": "awq"},
    GPTQ: {"method": "gptq"},
    BEST: {"method": "awq+gptq"},
}
OURS = tuple(METHODS)
WIDE, NARROW, SMOOTH, CURVE = "group 128", "group 64", "W8A8", "bits"
TARGET_BITS = (4.25, 4.5, 5.0, 6.0)
KINDS = ("Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K")


def _job(name: str, group: int, **more: Any) -> dict[str, Any]:
    """AWQ's layout, or where matrices differ in bits compressed-tensors."""
    scheme = {"bits": 4, "group_size": group, "symmetric": False}
    form = "compressed-tensors" if "target_bpw" in more else "awq"
    return {"recipe": {**METHODS[name], "scheme": scheme, **more}, "format": form}


def _ours(case: str, group: int) -> list[Side]:
    none = {PLAIN: 0}
    return [Side(case, name, "ours", _job(name, group), samples=none.get(name)) for name in METHODS]


def _rival(package: str, name: str, method: str, symmetric: bool) -> Side:
    job = {"bits": 4, "group": 64, "symmetric": symmetric, "method": method}
    return Side(NARROW, name, "rival", job, package)


RIVALS = [
    _rival("gptqmodel", "GPTQModel GPTQ", "gptq", True),
    _rival("llmcompressor", "llm-compressor GPTQ", "gptq", False),
    _rival("gptqmodel", "GPTQModel GPTQ, act-order", "gptq act-order", True),
    _rival("llmcompressor", "llm-compressor AWQ", "awq", False),
    _rival("llmcompressor", "llm-compressor AWQ + GPTQ", "awq+gptq", False),
    _rival("gptqmodel", "GPTQModel AWQ", "awq", False),
    _rival("autoawq", "AutoAWQ", "awq", False),
]
_BYTES = {"bits": 8, "group_size": -1, "symmetric": True}
W8A8 = [
    Side(
        SMOOTH,
        "smooth_quant",
        "ours",
        {"recipe": {"method": "smooth_quant", "scheme": _BYTES}, "format": "w8a8"},
    ),
    Side(SMOOTH, "llm-compressor SmoothQuant", "rival", {"method": "smoothquant"}, "llmcompressor"),
]
MIXED = [Side(CURVE, f"{bits} bits", "ours", _job(BEST, 128, target_bpw=bits)) for bits in TARGET_BITS]
LLAMA_CPP = [Side(CURVE, kind, "llama.cpp", {"kind": kind}) for kind in KINDS]
WITH_MATRIX = [
    Side(CURVE, f"{kind} with imatrix", "llama.cpp", {"kind": kind, "imatrix": True}) for kind in KINDS
]


def _study(case: str, name: object, group: int = 128, **data: Any) -> Side:
    return Side(case, str(name), "ours", _job(BEST, group), models=("demo",), **data)


STUDIES = [
    *(_study("samples", n, samples=n, length=256) for n in (32, 128, 512)),
    *(_study("length", n, samples=32_768 // n, length=n) for n in (128, 512, 2048)),
    *(_study("group", n, n) for n in (32, 64, 128, -1)),
    *(_study("text", text, text=text) for text in ("general", "matching", "foreign")),
]
# What is judged comes first, and of the others those that take minutes before those that take hours.
SIDES = [
    Side("original", "original", "original"),
    *_ours(WIDE, 128),
    *_ours(NARROW, 64),
    *RIVALS[:3],
    *LLAMA_CPP,
    *MIXED,
    W8A8[0],
    *STUDIES,
    *WITH_MATRIX,
    *RIVALS[3:],
    W8A8[1],
]
CASES = tuple(dict.fromkeys(side.case for side in SIDES))
