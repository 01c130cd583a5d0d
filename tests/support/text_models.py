"""Tokenizer directories built with the tokenizers library alone, for comparison with transformers."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
from demo_model import demo_gguf
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers


@lru_cache(maxsize=1)
def demo_fields() -> dict[str, Any]:
    """All metadata of the demo file, read by gguf-py."""
    fields = gguf.GGUFReader(demo_gguf()).fields
    return {name: field.contents() for name, field in fields.items()}


def write_demo_directory(path: Path) -> Path:
    """The demo's tokenizer and template as a Hugging Face directory of the public model's form."""
    fields = demo_fields()
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens[:17]])
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "chat_template": fields["tokenizer.chat_template"],
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    )
    return path


def write_sentencepiece_directory(path: Path, metaspace: bool = False, template: str | None = None) -> Path:
    """A byte-fallback vocabulary of the Llama 2 form; its text has words that begin with a blank.

    metaspace: with the Metaspace pre-tokenizer of newer files instead of a normaliser.
    """
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = [chr(c) for c in range(97, 123)]
    pieces += ["▁", "▁▁", *letters, "le", "lea", "▁le", "▁lea", "tw", "▁tw", "▁two", "é", "<", ">", "/"]
    merges = [
        ("▁", "▁"),
        ("l", "e"),
        ("le", "a"),
        ("▁", "le"),
        ("▁le", "a"),
        ("t", "w"),
        ("▁", "tw"),
        ("▁tw", "o"),
    ]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in pieces[:3]])
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
        "unk_token": "<unk>",
    }
    if template is not None:
        config["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    )
    return path


def tiny_metadata(**changes: Any) -> dict[str, Any]:
    """Metadata of a small byte-level vocabulary; `changes` replace `tokenizer.ggml.` keys."""
    alphabet = [token for token in demo_fields()["tokenizer.ggml.tokens"] if len(token) == 1]
    tokens = ["<|begin|>", "<|end|>", "<tool>", *alphabet, "ab"]
    metadata = {
        "model": "gpt2",
        "pre": "llama-bpe",
        "tokens": tokens,
        "merges": ["a b"],
        "token_type": [3, 3, 4, *[1] * (len(tokens) - 3)],
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (metadata | changes).items()}
