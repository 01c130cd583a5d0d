"""A vocabulary of bytes and a few control tokens: the ids of every text are known, tests need no model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from lmdeploy.engine.draft_policy import AdaptivePolicy
from lmdeploy.engine.fake import FakeExecutor
from lmdeploy.engine.guided import Guides
from lmdeploy.engine.loop import Engine, EngineOptions
from lmdeploy.engine.prompt_lookup import PromptLookup
from lmdeploy.engine.speculation import Speculation
from lmdeploy.runtime.generate import Frontend
from lmdeploy.runtime.grammars import LLGrammars
from lmdeploy.text.chat_template import ChatTemplate
from lmdeploy.text.tokenizer import Tokenizer

CONTROL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
WORDS = (" the", " bad", "bad")  # a few tokens of several bytes
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> Tokenizer:
    """Ids 0 to 255 are the bytes, then WORDS (never produced by encoding), then CONTROL."""
    byte_chars = _gpt2_alphabet()
    vocab = {char: byte for byte, char in byte_chars.items()}
    for word in WORDS:
        vocab["".join(byte_chars[b] for b in word.encode())] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    end = backend.token_to_id("<|im_end|>")
    return Tokenizer(backend, "byte model", bos_id=backend.token_to_id("<s>"), eos_ids=[end])


def _gpt2_alphabet() -> dict[int, str]:
    """Byte -> the character that GPT-2 vocabularies write for it."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in keep]
    return {**{b: chr(b) for b in keep}, **{b: chr(256 + i) for i, b in enumerate(rest)}}


def make_frontend(
    session_len: int = 512,
    template: str | None = CHATML,
    defaults: Mapping[str, float] | None = None,
    **more: Any,
) -> Frontend:
    tokenizer = make_tokenizer()
    templates = {} if template is None else {"default": template}
    return Frontend(
        tokenizer,
        ChatTemplate(templates, tokenizer, "byte model", **more),
        session_len=session_len,
        vocab_size=tokenizer.vocab_size,
        sampling_defaults=defaults,
    )


def make_engine(
    script: str | bytes = b"", *, num_blocks: int = 128, lookup: bool = False, **executor: Any
) -> Engine:
    """An engine on the fake executor; answers begin with `script`, where a last "$" means <|im_end|>.

    lookup: with speculative decoding by prompt lookup.
    """
    text = script.encode() if isinstance(script, str) else script
    ids = list(text.removesuffix(b"$"))
    tokenizer = make_tokenizer()
    if text.endswith(b"$"):
        ids += tokenizer.eos_ids
    fake = FakeExecutor(num_blocks=num_blocks, vocab_size=tokenizer.vocab_size, script=tuple(ids), **executor)
    proposer = PromptLookup(2, 5)
    speculation = Speculation(proposer, AdaptivePolicy(proposer.num_kinds, 8)) if lookup else None
    guides = Guides(LLGrammars(make_tokenizer, tokenizer.vocab_size), tokenizer.vocab_size)
    return Engine(fake, EngineOptions(max_batch_size=8, max_prefill_token_num=64), speculation, guides)
