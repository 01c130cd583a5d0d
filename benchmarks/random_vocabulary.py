"""A byte-level BPE vocabulary of any size, made up by rule: every text can be encoded, as fast as a real one.

Tokens are the 256 bytes, then strings of two, three and four lower-case letters, with and without a blank
before them. Knows no model; `random_models.py` writes it beside random weights.
"""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models

from lmdeploy.text.byte_alphabet import BYTE_OF
from lmdeploy.text.split_rules import RULES

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_BLANK = "Ġ"  # how byte-level vocabularies write a blank


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """texts: tokens 0, 1, ...; control: those after them."""

    texts: list[str]
    control: list[str]
    merges: list[tuple[str, str]]


def make_vocabulary(ids: int, size: int) -> Vocabulary:
    """`size` tokens, of which the first `ids` stand for text."""
    alphabet = list(BYTE_OF)
    merges = list(itertools.islice(_merges(), ids - len(alphabet)))
    texts = alphabet + [left + right for left, right in merges]
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    control += [f"<|reserved_{i}|>" for i in range(size - ids - len(control))]
    return Vocabulary(texts, control, merges)


def _merges() -> Iterator[tuple[str, str]]:
    letters = string.ascii_lowercase
    pairs = ["".join(pair) for pair in itertools.product(letters, repeat=2)]
    yield from ((pair[0], pair[1]) for pair in pairs)
    yield from ((_BLANK, letter) for letter in letters)
    yield from ((pair, letter) for pair, letter in itertools.product(pairs, letters))
    yield from ((_BLANK, pair) for pair in pairs)
    yield from itertools.product(pairs, pairs)


def write_tokenizer(vocabulary: Vocabulary, split_rule: str, directory: Path) -> None:
    """tokenizer.json and tokenizer_config.json with a ChatML template."""
    backend = Tokenizer(models.BPE({text: i for i, text in enumerate(vocabulary.texts)}, vocabulary.merges))
    backend.pre_tokenizer = RULES[split_rule].make()
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in vocabulary.control]
    )
    backend.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "add_bos_token": False,
        "chat_template": CHATML,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
