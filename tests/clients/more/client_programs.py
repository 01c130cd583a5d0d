"""Programs of the command line: llm, codex and opencode, the last two with a tool that writes a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from expected import HELLO, KEY, MODEL

HERE = Path(__file__).parent
PROGRAMS = HERE / "node_modules" / ".bin"
TASK = "Write the file hello.txt"


def run(command: list[str], folder: Path, **environment: str) -> str:
    home = folder / "home"
    home.mkdir(exist_ok=True)
    names = {**os.environ, "HOME": str(home), "XDG_CONFIG_HOME": str(home), "PWD": str(folder), **environment}
    done = subprocess.run(
        command, cwd=folder, env=names, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("options", [[], ["--no-stream"]], ids=["stream", "whole"])
def test_llm(base_url: str, tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: {MODEL}\n  model_name: {MODEL}\n  api_base: {base_url}\n"
        "  api_key_name: own\n  supports_schema: true\n"
    )
    llm = [str(Path(sys.executable).parent / "llm"), "-m", MODEL, "--key", KEY, "--no-log", *options]
    assert run([*llm, "hi"], tmp_path, LLM_USER_PATH=str(tmp_path)).strip() == HELLO
    answer = run([*llm, "--schema", "name, age int", "Who is Ada?"], tmp_path, LLM_USER_PATH=str(tmp_path))
    assert json.loads(answer) == {"name": "Ada", "age": 36}


def test_codex(base_url: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        f'model = "{MODEL}"\nmodel_provider = "local"\napproval_policy = "never"\n'
        'sandbox_mode = "danger-full-access"\n[model_providers.local]\nname = "local"\n'
        f'base_url = "{base_url}"\nenv_key = "CODEX_KEY"\nwire_api = "responses"\n'
    )
    command = [str(PROGRAMS / "codex"), "exec", "--skip-git-repo-check", TASK]
    said = run(command, tmp_path, CODEX_HOME=str(tmp_path), CODEX_KEY=KEY)
    assert (tmp_path / "hello.txt").read_text() == "hello"
    assert said.strip().endswith("The file is written.")


def test_opencode(base_url: str, tmp_path: Path) -> None:
    options = {"baseURL": base_url, "apiKey": KEY}
    models = {MODEL: {"name": MODEL}}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "local", "options": options, "models": models}
    allowed = {"bash": "allow"}
    config = {"provider": {"local": provider}, "autoupdate": False, "permission": allowed}
    (tmp_path / "opencode.json").write_text(json.dumps(config))
    command = [str(PROGRAMS / "opencode"), "run", "--model", f"local/{MODEL}", TASK]
    run(command, tmp_path, OPENCODE_CONFIG=str(tmp_path / "opencode.json"))
    assert (tmp_path / "hello.txt").read_text() == "hello"
