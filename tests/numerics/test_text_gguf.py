"""The tokenizer of a GGUF file against transformers, which needs torch to read such files."""

from __future__ import annotations

from typing import Any

import pytest
from demo_model import demo_gguf
from transformers import AutoTokenizer

from lmdeploy.text.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
    "",
    "Hello world",
    "  two spaces\n\n\ttabs  and trailing ",
    "It's 1234567 o'clock, isn't it? We'LL see.",
    "naïve café — 漢字かな交じり文 👩‍👩‍👧 é é \u200b\u00a0x",
    "def f(x):\n    return x**2  # ok\r\n",
    "ｆｕｌｌ-width letters",
]


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return load_tokenizer(demo_gguf())


@pytest.fixture(scope="module")
def theirs() -> Any:
    return AutoTokenizer.from_pretrained(str(demo_gguf().parent), gguf_file=demo_gguf().name)


# Without digits beyond ASCII: transformers' GGUF loader does not know that this model splits digits.
@pytest.mark.parametrize("text", TEXTS)
def test_gguf_ids_equal_transformers(text: str, demo: Tokenizer, theirs: Any) -> None:
    assert demo.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
