"""Which engine computes a model on this machine, where, and why: one line for people.

The user's word first; else the native engine where it can compute the model, the PyTorch engine where a card
is there or the native engine cannot. Looks at no weight and imports no engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lmdeploy.config import EngineConfig, PytorchEngineConfig, TurbomindEngineConfig
from lmdeploy.errors import ConfigError, ModelError
from lmdeploy.runtime.gpu import Gpu, TorchInstall

Backend = Literal["turbomind", "pytorch"]
Device = Literal["cpu", "cuda"]

INSTALL = "pip install lmdeploy[torch]"


@dataclass(frozen=True, slots=True)
class Choice:
    """An engine, its device and the type of its matrices ("" for the native engine, which keeps the file's).

    gpu: the card that computes, or one that could. note: what the user should know beside `why`.
    """

    backend: Backend
    device: Device
    dtype: str
    why: str
    gpu: Gpu | None = None
    note: str | None = None

    def line(self) -> str:
        """As the start-up account shows it."""
        where = "the CPU" if self.device == "cpu" or self.gpu is None else f"the {self.gpu.name}"
        kept = f" in {self.dtype}" if self.dtype else ""
        return f"{self.backend} on {where}{kept}: {self.why}"


@dataclass(frozen=True, slots=True)
class Offers:
    """What the machine and the installation offer."""

    gpus: tuple[Gpu, ...]
    torch: TorchInstall | None

    @property
    def card(self) -> Gpu | None:
        """The card that the installed torch can use."""
        return self.gpus[0] if self.gpus and self.torch and self.torch.cuda else None

    def why_no_card(self) -> str:
        if not self.gpus:
            return "this machine has no NVIDIA GPU, or its driver is not loaded"
        if self.torch is None:
            return f"torch is not installed ({INSTALL})"
        return f"torch {self.torch.version} was built without CUDA; install a CUDA build of it"


def choose_engine(config: EngineConfig, offers: Offers, refusal: str | None, packed: bool = False) -> Choice:
    """refusal: why the native engine cannot compute the model, None when it can. packed: its weights are in
    the native engine's own form. ConfigError, ModelError."""
    if packed:
        return _packed(config, offers, refusal)
    if isinstance(config, TurbomindEngineConfig):
        if refusal is not None:
            raise ModelError(f"{refusal}; the PyTorch engine may (PytorchEngineConfig, --backend pytorch)")
        return _native("as asked", offers, note=_unused_card(offers))
    if isinstance(config, PytorchEngineConfig):
        return _torch(config, offers, "as asked")
    if refusal is not None:
        if offers.torch is None:
            raise ModelError(f"{refusal}; the PyTorch engine may: {INSTALL}")
        return _torch(PytorchEngineConfig(dtype=config.dtype), offers, refusal)
    if offers.card is not None:
        return _torch(PytorchEngineConfig(dtype=config.dtype), offers, "there is a GPU")
    if offers.gpus:
        return _native("it computes this model", offers, note=_unused_card(offers))
    return _native("it computes this model, and there is no GPU", offers)


def _packed(config: EngineConfig, offers: Offers, refusal: str | None) -> Choice:
    if isinstance(config, PytorchEngineConfig):
        raise ModelError(
            "the model was converted for the native engine, which the PyTorch engine cannot read; give it the"
            " model as it was before"
        )
    if refusal is not None:
        raise ModelError(refusal)
    return _native("the model was converted for it", offers, note=_unused_card(offers))


def on_the_cpu(choice: Choice, offers: Offers, reason: str) -> Choice:
    """Instead of a card that was chosen for the user and is too small."""
    gpu = choice.gpu.name if choice.gpu else "GPU"
    return _native(f"the {gpu} is too small: {reason}", offers)


def _native(why: str, offers: Offers, note: str | None = None) -> Choice:
    return Choice("turbomind", "cpu", "", why, offers.gpus[0] if offers.gpus else None, note)


def _unused_card(offers: Offers) -> str | None:
    if not offers.gpus:
        return None
    gpu = offers.gpus[0].name
    needs = "" if offers.card else f", once it can: {offers.why_no_card()}"
    return (
        f"the {gpu} is not used: the native engine computes on the CPU; the PyTorch engine would use it"
        f" (PytorchEngineConfig, --backend pytorch){needs}"
    )


def _torch(config: PytorchEngineConfig, offers: Offers, why: str) -> Choice:
    if offers.torch is None:
        raise ConfigError(f"the PyTorch engine needs torch, which is not installed: {INSTALL}")
    if config.device_type == "cuda" and offers.card is None:
        raise ConfigError(f"device_type=cuda: {offers.why_no_card()}", param="device_type")
    device: Device = "cuda" if offers.card is not None and config.device_type != "cpu" else "cpu"
    dtype = {"cuda": "bfloat16", "cpu": "float32"}[device] if config.dtype == "auto" else config.dtype
    return Choice("pytorch", device, dtype, why, offers.card)
