"""Speculative decoding from the outside, on the demo model: the same answers, told in fewer steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from demo_model import demo_gguf
from draft_gguf import write_draft
from executors import EXECUTORS, engine_config
from tiny_model import write_tiny_model

from lmdeploy import GenerationConfig, SpeculativeConfig, TurbomindEngineConfig, pipeline
from lmdeploy.cli.smoke import write_model

TEXT = (
    "The old bridge was closed in the morning, because the water had risen by two metres in a single night."
)
PROMPTS = [f"Repeat this text word by word: {TEXT}", "Write a long story about a lighthouse keeper."]
GREEDY = GenerationConfig(max_new_tokens=48, do_sample=False, logprobs=2)
SAMPLED = GenerationConfig(
    max_new_tokens=48, temperature=0.9, top_k=40, random_seed=5, repetition_penalty=1.1
)


def answers(
    model: Path, config: Any, speculative: Any, wanted: GenerationConfig
) -> tuple[list[Any], int, int]:
    """What was said, steps taken, drafts that were right."""
    with pipeline(str(model), backend_config=config, speculative_config=speculative) as pipe:
        said = pipe(PROMPTS, gen_config=wanted)
        totals = pipe._client.stats().totals
    return [(r.text, r.token_ids, r.logprobs) for r in said], totals.steps, totals.accepted_tokens


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_draft(tmp_path_factory.mktemp("draft") / "draft.gguf", demo_gguf())


@pytest.mark.parametrize("wanted", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_demo_model_says_the_same(draft: Path, wanted: GenerationConfig) -> None:
    config = TurbomindEngineConfig(session_len=512, max_batch_size=2, cache_block_seq_len=16)
    said, steps, _ = answers(demo_gguf(), config, None, wanted)
    looked_up = answers(demo_gguf(), config, SpeculativeConfig("ngram"), wanted)
    assert looked_up[0] == said
    assert looked_up[1] <= steps
    assert answers(demo_gguf(), config, {"model": str(draft)}, wanted)[0] == said
    itself = answers(demo_gguf(), config, {"model": str(demo_gguf())}, wanted)
    assert itself[0] == said
    assert itself[2] > 0


@pytest.mark.parametrize("executor", EXECUTORS)
def test_both_engines_say_the_same_with_a_draft_model(executor: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    (tmp_path / "draft").mkdir()
    write_model(tmp_path / "draft", seed=1)
    config = engine_config(executor, session_len=256, max_batch_size=2, cache_block_seq_len=16, num_threads=1)
    wanted = GenerationConfig(max_new_tokens=40, ignore_eos=True, temperature=0.8, random_seed=3)
    said, _, _ = answers(tmp_path / "model", config, None, wanted)
    for model in ("draft", "model"):
        again, _, accepted = answers(tmp_path / "model", config, {"model": str(tmp_path / model)}, wanted)
        assert again == said
        assert accepted > 0 or model == "draft"


def test_the_command_shows_what_it_was_told(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    command = [sys.executable, "-m", "lmdeploy", "chat", str(model), "--prompt", "la la la la"]
    flags = ["--max-new-tokens", "24", "--num-threads", "1", "--speculative-num-draft-tokens", "3"]
    plain = subprocess.run([*command, *flags[:-2]], check=True, capture_output=True, text=True)
    for more, line in {
        ("--speculative-algorithm", "ngram"): "up to 3 tokens ahead, from prompt lookup by 2 to 5 tokens",
        ("--speculative-draft-model", str(model)): f"up to 3 tokens ahead, from {model}",
    }.items():
        out = subprocess.run([*command, *flags, *more], check=True, capture_output=True, text=True)
        assert line in out.stderr
        assert out.stdout == plain.stdout


def test_memory_with_a_draft_model_is_the_plan() -> None:
    """The process must be fresh: what other tests have freed would hide growth."""
    script = f"""
from lmdeploy import SpeculativeConfig, TurbomindEngineConfig
from lmdeploy.runtime.build import build_engine
from lmdeploy.runtime.machine import resident_bytes
from lmdeploy.runtime.resolve import resolve
demo = {str(demo_gguf())!r}
config = TurbomindEngineConfig(session_len=1024, max_batch_size=2, num_threads=1)
config = resolve(demo, config, speculative=SpeculativeConfig(model=demo))
before = resident_bytes()
engine = build_engine(config)
plan = config.plan
print(resident_bytes() - before, plan.weights + plan.workspace + plan.kv_pool + plan.draft)
"""
    out = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    took, planned = map(int, out.stdout.split())
    assert took == pytest.approx(planned, abs=24 << 20)
