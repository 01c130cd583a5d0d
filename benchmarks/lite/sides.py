"""What is compared: cases, the sides of each, and how a side's model is made. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Maker = Literal["ours", "rival", "llama.cpp", "original"]
MODELS = ("demo", "twin")


@dataclass(frozen=True, slots=True)
class Side:
    """One way to make a model of `case`.

    options: of ours, flags of `lmdeploy lite`, the command first; of llama.cpp, its kind. job: what a rival
    is told. samples, length and text replace those of the run.
    """

    case: str
    name: str
    maker: Maker
    options: tuple[str, ...] = ()
    package: str = ""  # of a rival
    job: dict[str, Any] = field(default_factory=dict)
    models: tuple[str, ...] = MODELS
    samples: int | None = None
    length: int | None = None
    text: str = "matching"


PLAIN, AWQ, GPTQ, BEST = "plain rounding", "AWQ", "GPTQ", "AWQ + GPTQ"
METHODS: dict[str, tuple[str, ...]] = {
    PLAIN: ("auto_awq", "--calib-samples", "0"),
    AWQ: ("auto_awq", "--search-scale"),
    GPTQ: ("auto_gptq",),
    BEST: ("auto_gptq", "--method", "awq+gptq"),
}
OURS = tuple(METHODS)
WIDE, NARROW, SMOOTH, CURVE = "group 128", "group 64", "W8A8", "bits"
TARGET_BITS = (4.25, 4.5, 5.0, 6.0)
KINDS = ("Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K")


def _ours(case: str, group: int) -> list[Side]:
    return [
        Side(case, name, "ours", (*options, "--w-group-size", str(group)))
        for name, options in METHODS.items()
    ]


def _rival(package: str, name: str, method: str, symmetric: bool) -> Side:
    job = {"bits": 4, "group": 64, "symmetric": symmetric, "method": method}
    return Side(NARROW, name, "rival", package=package, job=job)


RIVALS = [
    _rival("gptqmodel", "GPTQModel GPTQ", "gptq", True),
    _rival("llmcompressor", "llm-compressor GPTQ", "gptq", False),
    _rival("gptqmodel", "GPTQModel GPTQ, act-order", "gptq act-order", True),
    _rival("llmcompressor", "llm-compressor AWQ", "awq", False),
    _rival("llmcompressor", "llm-compressor AWQ + GPTQ", "awq+gptq", False),
    _rival("gptqmodel", "GPTQModel AWQ", "awq", False),
    _rival("autoawq", "AutoAWQ", "awq", False),
]
_SMOOTH_RIVAL = Side(
    SMOOTH, "llm-compressor SmoothQuant", "rival", package="llmcompressor", job={"method": "smoothquant"}
)
MIXED = [
    Side(CURVE, f"{bits} bits", "ours", (*METHODS[BEST], "--w-group-size", "128", "--target-bpw", str(bits)))
    for bits in TARGET_BITS
]
LLAMA_CPP = [Side(CURVE, kind, "llama.cpp", (kind,)) for kind in KINDS]
WITH_MATRIX = [Side(CURVE, f"{kind} with imatrix", "llama.cpp", (kind, "imatrix")) for kind in KINDS]

_STUDY: dict[str, Any] = {"maker": "ours", "models": ("demo",)}
STUDIES = [
    *(
        Side("samples", str(n), options=METHODS[BEST], samples=n, length=256, **_STUDY)
        for n in (32, 128, 512)
    ),
    *(
        Side("length", str(n), options=METHODS[BEST], samples=32_768 // n, length=n, **_STUDY)
        for n in (128, 512, 2048)
    ),
    *(
        Side("group", str(n), options=(*METHODS[BEST], "--w-group-size", str(n)), **_STUDY)
        for n in (32, 64, 128, -1)
    ),
    *(
        Side("text", text, options=METHODS[BEST], text=text, **_STUDY)
        for text in ("general", "matching", "foreign")
    ),
]
SIDES = [
    *(Side(case, "original", "original") for case in ("original",)),
    *_ours(WIDE, 128),
    *_ours(NARROW, 64),
    *RIVALS,
    *MIXED,
    *LLAMA_CPP,
    Side(SMOOTH, "smooth_quant", "ours", ("smooth_quant",)),
    _SMOOTH_RIVAL,
    *WITH_MATRIX,
    *STUDIES,
]
CASES = tuple(dict.fromkeys(side.case for side in SIDES))
