"""What a family declares, and the few readings that all families share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lmdeploy.models.checkpoint import NameTable
from lmdeploy.models.fields import Fields
from lmdeploy.models.gguf import GGUFFile
from lmdeploy.models.spec import Activation, ModelSpec

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class Family:
    """One row of the registry: names it answers to, how to read its description, where its tensors are."""

    name: str
    hf_architectures: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    from_hf: Callable[[Fields], ModelSpec]
    from_gguf: Callable[[GGUFFile], ModelSpec]
    hf_names: NameTable
    gguf_names: NameTable


def activation(config: Fields, key: str = "hidden_act") -> Activation:
    """The activation of a gated block; ModelError naming it when it is none of the known ones."""
    name = config.text(key, "silu")
    if name not in _ACTIVATIONS:
        raise config.fail(key, f"is {name!r}, which is not supported (supported: {', '.join(_ACTIVATIONS)})")
    return _ACTIVATIONS[name]
