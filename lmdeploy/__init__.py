"""LMDeploy: compress, run and serve large language models.

The public names, loaded when they are first used: `import lmdeploy` alone reads no other module.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmdeploy.config import (
        ChatTemplateConfig,
        GenerationConfig,
        PytorchEngineConfig,
        TurbomindEngineConfig,
    )
    from lmdeploy.pipeline import Pipeline, Response, Session, pipeline

__version__ = "0.1.0"

__all__ = [
    "ChatTemplateConfig",
    "GenerationConfig",
    "Pipeline",
    "PytorchEngineConfig",
    "Response",
    "Session",
    "SpeculativeConfig",
    "TurbomindEngineConfig",
    "__version__",
    "pipeline",
]

_HOME = {
    "ChatTemplateConfig": "lmdeploy.config",
    "GenerationConfig": "lmdeploy.config",
    "PytorchEngineConfig": "lmdeploy.config",
    "SpeculativeConfig": "lmdeploy.speculative",
    "TurbomindEngineConfig": "lmdeploy.config",
    "Pipeline": "lmdeploy.pipeline",
    "Response": "lmdeploy.pipeline",
    "Session": "lmdeploy.pipeline",
    "pipeline": "lmdeploy.pipeline",
}

_ABSENT = {
    "VisionConfig": "models here read text only",
    "Tokenizer": "lmdeploy.text.tokenizer.load_tokenizer(path) gives one",
    "client": "use any OpenAI client",
}


class _Package(ModuleType):
    """Keeps `lmdeploy.pipeline` the function, although importing the module of that name would replace it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "pipeline" and isinstance(value, ModuleType):
            value = value.pipeline
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name in _ABSENT:
        raise ImportError(f"{name} is not available: {_ABSENT[name]}", name=__name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
