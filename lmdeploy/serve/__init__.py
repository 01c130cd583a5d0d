"""Talks HTTP. The names for scripts are loaded when they are first used: nothing here costs an import."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmdeploy.serve.client import APIClient, get_model_list

__all__ = ["APIClient", "get_model_list"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("lmdeploy.serve.client"), name)
