"""Tiny models beside an original: random ones with a byte tokenizer, as they are and disturbed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from tiny_model import write_tiny_model


def write_original(folder: Path) -> Path:
    """Weights large enough that its next tokens are far from equally likely."""
    write_tiny_model(folder)
    change(folder, lambda name, value: value * 3 if value.ndim == 2 else value)
    return folder


def write_disturbed(folder: Path, by: float) -> Path:
    """The original with noise in its layers."""
    write_original(folder)
    rng = np.random.default_rng(5)

    def noisy(name: str, value: np.ndarray) -> np.ndarray:
        noise = by * value.std() * rng.standard_normal(value.shape)
        return value + noise.astype(value.dtype) if ".layers." in name and value.ndim == 2 else value

    change(folder, noisy)
    return folder


def change(folder: Path, how: object) -> None:
    assert callable(how)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    new = {name: np.ascontiguousarray(how(name, tensors[name])) for name in sorted(tensors)}
    save_file(new, file, {"format": "pt"})
