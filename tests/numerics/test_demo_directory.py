"""The demo model's directory, which the tests of quantisation start from, is the demo model."""

from __future__ import annotations

import numpy as np
import torch
from demo_directory import demo_directory
from demo_model import demo_gguf, reference_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmdeploy.text.chat_template import load_chat_template
from lmdeploy.text.tokenizer import load_tokenizer

_MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def test_weights_are_those_of_the_file() -> None:
    model = AutoModelForCausalLM.from_pretrained(demo_directory(), dtype=torch.float32)
    ids = torch.tensor([AutoTokenizer.from_pretrained(demo_directory())("The sky is blue.")["input_ids"]])
    with torch.no_grad():
        found, expected = (m(ids).logits.numpy() for m in (model, reference_model()))
    assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()


def test_prompts_are_those_of_the_file() -> None:
    texts = [load_chat_template(p, load_tokenizer(p)) for p in (demo_directory(), demo_gguf())]
    assert texts[0].encode(_MESSAGES) == texts[1].encode(_MESSAGES)
