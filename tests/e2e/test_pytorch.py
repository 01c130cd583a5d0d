"""The PyTorch engine from the outside: pipeline, chat and server on a tiny model; memory of its process."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from demo_model import demo_gguf
from tiny_model import write_tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from lmdeploy import GenerationConfig, PytorchEngineConfig, pipeline
from lmdeploy.config import EngineConfig
from lmdeploy.engine.request import Request
from lmdeploy.models.reference import Reference
from lmdeploy.models.registry import open_checkpoint
from lmdeploy.pipeline import Response
from lmdeploy.runtime.client import ProcessClient
from lmdeploy.runtime.machine import resident_bytes
from lmdeploy.runtime.messages import Recipe
from lmdeploy.runtime.resolve import resolve

LMDEPLOY = [sys.executable, "-m", "lmdeploy"]
FLAGS = ["--backend", "pytorch", "--device", "cpu", "--num-threads", "1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def test_pipeline_generates_what_the_reference_would(model: Path) -> None:
    config = PytorchEngineConfig(device_type="cpu", num_threads=1, max_batch_size=2)
    with pipeline(str(model), backend_config=config) as pipe:
        answer = pipe("Hello", gen_config=GenerationConfig(max_new_tokens=8, ignore_eos=True))
        assert isinstance(answer, Response)
        ids = pipe.frontend.prompt_ids("Hello")
    reference = Reference(open_checkpoint(model))
    for token in answer.token_ids:
        assert reference.logits(ids)[-1].argmax() == token
        ids = [*ids, token]
    assert len(answer.token_ids) == 8


def test_a_model_the_native_engine_refuses(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Heads of 20 values; nobody names an engine."""
    shutil.copytree(model, tmp_path / "odd")
    torch.manual_seed(0)
    sizes = dict(vocab_size=258, hidden_size=80, intermediate_size=96, max_position_embeddings=256)
    config = LlamaConfig(
        **sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=20
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "odd")
    with caplog.at_level(logging.WARNING, "lmdeploy"), pipeline(str(tmp_path / "odd")) as pipe:
        answer = pipe("Hello", gen_config=GenerationConfig(max_new_tokens=4, ignore_eos=True))
    assert isinstance(answer, Response)
    assert answer.generate_token_len == 4
    (line,) = [x for x in caplog.messages if x.startswith("engine: ")]
    assert "pytorch on the CPU in float32: head_dim 20 is not supported by the native engine" in line


@pytest.mark.parametrize("config", [None, EngineConfig(session_len=64)])
def test_nobody_names_an_engine(
    config: EngineConfig | None, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "lmdeploy"), pipeline(str(model), backend_config=config):
        pass
    (line,) = [x for x in caplog.messages if x.startswith("engine: ")]
    assert line.startswith("engine: turbomind on the CPU: it computes this model")


def test_chat_says_which_engine(model: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "lmdeploy",
        "chat",
        str(model),
        "--prompt",
        "hi",
        "--max-new-tokens",
        "4",
    ]
    done = subprocess.run([*command, *FLAGS], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "engine     pytorch on the CPU in float32: as asked" in done.stderr


def test_server_answers(model: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "lmdeploy",
        "serve",
        "api_server",
        str(model),
        "--server-name",
        "127.0.0.1",
    ]
    process = subprocess.Popen(
        [*command, "--server-port", "0", *FLAGS], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout is not None
        lines = iter(process.stdout)
        text = ""
        while (found := re.search(r"at (http://\S+/v1)\n", text)) is None:
            text += next(lines)
        assert "engine     pytorch on the CPU in float32: as asked" in text
        body = {"model": model.name, "prompt": "abc", "max_tokens": 5, "temperature": 0}
        answers = [httpx.post(f"{found[1]}/completions", json=body, timeout=60).json() for _ in range(2)]
        assert answers[0]["usage"]["prompt_tokens"] > 0
        assert answers[0]["choices"] == answers[1]["choices"]
    finally:
        process.terminate()
        assert process.wait(30) == 0


async def test_resident_memory_stays_within_the_plan() -> None:
    """Every block of the cache is used; the process takes no more than planned, and not much less."""
    wanted = PytorchEngineConfig(device_type="cpu", session_len=256, max_batch_size=2, num_threads=1)
    config = resolve(str(demo_gguf()), wanted)
    client = ProcessClient(Recipe.of("lmdeploy.runtime.build:build_engine", config))
    await client.start()
    try:
        assert client.pid is not None
        random = np.random.default_rng(0)
        for round_ in range(2):
            requests = [
                Request(f"{round_}-{i}", random.integers(1000, 40000, 252, np.int32), max_new_tokens=4)
                for i in range(2)
            ]
            async for event in await client.submit(*requests):
                assert event.error is None
        taken = resident_bytes(client.pid)
        assert 0.9 * config.plan.total < taken <= config.plan.total, (taken, config.plan)
    finally:
        await client.close()
