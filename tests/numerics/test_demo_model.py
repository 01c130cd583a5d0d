"""The demo model on each engine against transformers in float32 on the dequantised weights.

Tolerance, set by the native engine: activations are rounded to 14 bits a group (two int8 planes), keys and
values to 15. Each of 30 layers adds a relative error of some 1e-4; logits may differ by 5e-3 of their
standard deviation.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from demo_model import demo_gguf, reference_model
from executors import EXECUTORS, engine_config

from lmdeploy.engine.loop import Engine
from lmdeploy.engine.request import Request
from lmdeploy.runtime.build import build_engine
from lmdeploy.runtime.resolve import resolve
from lmdeploy.text.tokenizer import load_tokenizer

NEW_TOKENS = 24
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "In the beginning God created the heaven and the earth. And the earth was without form, and void;",
)


@pytest.fixture(scope="module", params=EXECUTORS)
def engine(request: pytest.FixtureRequest) -> Engine:
    config = engine_config(request.param, session_len=512, max_batch_size=4, num_threads=2)
    return build_engine(resolve(str(demo_gguf()), config))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits_and_greedy_text_equal_transformers(engine: Engine, prompt: str) -> None:
    ids = load_tokenizer(demo_gguf()).encode(prompt)
    engine.add(Request(prompt, np.array(ids, np.int32), max_new_tokens=NEW_TOKENS, want_logits=True))
    tokens: list[int] = []
    logits: list[np.ndarray] = []
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            tokens += event.token_ids
            if event.logits is not None:
                logits += list(event.logits)
    assert len(tokens) == NEW_TOKENS
    with torch.no_grad():
        wanted = reference_model()(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1].numpy()
    got = np.array(logits)
    assert np.sqrt(np.mean((got - wanted) ** 2)) <= 5e-3 * wanted.std()
    top = np.sort(wanted, axis=1)
    clear = top[:, -1] - top[:, -2] > 0.05  # a lead that the tolerance cannot turn over
    assert clear.sum() > NEW_TOKENS // 2
    assert (wanted.argmax(1) == np.array(tokens))[clear].all()
