"""A tiny random Llama as a Hugging Face directory, built in a moment without torch."""

from __future__ import annotations

from pathlib import Path

from lmdeploy.cli.smoke import write_model


def write_tiny_model(folder: Path) -> Path:
    """The model of `lmdeploy check_env --smoke`: config.json, model.safetensors, tokenizer files."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder)
    return folder
