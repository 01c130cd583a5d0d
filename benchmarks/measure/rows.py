"""The rows of the comparison: which model does what, and who takes part. Data only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Case:
    """`sequences` prompts of `prompt` random tokens, each continued by `new` tokens.

    A decode case counts tokens while all sequences decode; a prefill case the prompt over the time to its
    first token.
    """

    name: str
    sequences: int
    prompt: int
    new: int

    @property
    def decodes(self) -> bool:
        return self.new > 1


CASES = {
    case.name: case
    for case in (
        Case("decode1", 1, 32, 128),
        Case("decode8", 8, 64, 64),
        Case("decode32", 32, 64, 32),
        Case("prefill512", 1, 512, 1),
        Case("prefill2048", 1, 2048, 1),
    )
}
MODELS = ("135m", "0.5b", "1b", "8b")
FEW = {"8b": ("decode1", "prefill512")}  # a model that takes part in some cases only
ACCURACIES = ("fast", "auto", "exact")
OURS = "lmdeploy"


@dataclass(frozen=True, slots=True)
class Side:
    """One engine with one kind of weights."""

    engine: str  # OURS or a peer of peers/
    variant: str  # accuracy of ours, kind of weights of a peer
    form: str  # suffix of the model's folder that it loads
    models: tuple[str, ...] = MODELS

    @property
    def name(self) -> str:
        return f"{self.engine} {self.variant}"


SMALL = MODELS[:3]
SIDES = (
    *(Side(OURS, accuracy, "q4_0") for accuracy in ACCURACIES),
    Side(OURS, "bf16", "bf16", ("1b",)),  # unquantised weights
    Side("llama.cpp", "Q4_0", "q4_0"),
    Side("llama.cpp", "Q4_K_M", "q4_k_m"),
    Side("openvino", "int4", "openvino", SMALL),
    Side("vllm", "bf16", "bf16", SMALL),
    Side("vllm", "awq", "awq", ("0.5b", "1b")),
    Side("transformers", "bf16", "bf16", SMALL),
)


def cases_of(model: str) -> tuple[str, ...]:
    return FEW.get(model, tuple(CASES))
