"""Vocabularies given by ranks -> a tokenizers.Tokenizer with the ids of tiktoken.

Two forms: tiktoken's text files (a line: base64 of the bytes, rank) and Mistral's tekken.json. Both leave the
merges out; they follow from the ranks.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from lmdeploy.errors import ModelError
from lmdeploy.text.byte_alphabet import spell
from lmdeploy.text.merges import merges_by_rank
from lmdeploy.text.split_rules import ONE_DIGIT, THREE_DIGITS, split

_LINE = re.compile(rb"([A-Za-z0-9+/]+={0,2}) ([0-9]{1,9})")
# Tokens of the first tekken.json files, which do not list them; the rest up to the number stated are fillers.
_TEKKEN_SPECIAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
    "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
_LLAMA3_SPECIAL = {
    0: "<|begin_of_text|>", 1: "<|end_of_text|>", 4: "<|finetune_right_pad_id|>", 6: "<|start_header_id|>",
    7: "<|end_header_id|>", 8: "<|eom_id|>", 9: "<|eot_id|>", 10: "<|python_tag|>",
}  # fmt: skip
_QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))


@dataclass(frozen=True, slots=True)
class RankVocabulary:
    """tokens: bytes -> id, in the order of rank. special: control tokens by id. begin, ends: texts of the
    begin marker and of the tokens that end a turn, the tokenizer's own end first."""

    tokens: Mapping[bytes, int]
    special: Mapping[int, str]
    pattern: str
    composes: bool = False
    begin: str | None = None
    ends: tuple[str, ...] = ()


def is_rank_file(data: bytes) -> bool:
    """Whether a file's beginning is that of tiktoken's text form."""
    return _LINE.fullmatch(data.split(b"\n", 1)[0].rstrip(b"\r")) is not None


def read_tiktoken(data: bytes, name: str, special: Mapping[int, str], source: str) -> RankVocabulary:
    """special: what the model's own files declare; the public sets stand in where they declare nothing.

    `name` decides the pattern, as such a file holds none: qwen.tiktoken or tokenizer.model.
    """
    ranks = _ranks(data, source)
    if name == "qwen.tiktoken":
        declared = special or {len(ranks) + i: text for i, text in enumerate(_QWEN_SPECIAL)}
        return RankVocabulary(ranks, declared, ONE_DIGIT, True, None, ("<|im_end|>", "<|endoftext|>"))
    if name != "tokenizer.model":
        raise ModelError(
            f"{source}: how {name} cuts a text is not known (supported: qwen.tiktoken, tokenizer.model)."
        )
    if special:
        return RankVocabulary(ranks, special, THREE_DIGITS)
    if len(ranks) != 128000:
        raise ModelError(
            f"{source}: {len(ranks)} ranks and no control tokens: tokenizer_config.json must list them"
            " (added_tokens_decoder)."
        )
    texts = _llama3_special()
    special = {len(ranks) + i: text for i, text in enumerate(texts)}
    return RankVocabulary(ranks, special, THREE_DIGITS, False, texts[0], ("<|eot_id|>", texts[1]))


def _llama3_special() -> list[str]:
    """256 tokens: the named ones, the others reserved and numbered in order."""
    reserved = iter(range(256))
    return [_LLAMA3_SPECIAL.get(i) or f"<|reserved_special_token_{next(reserved)}|>" for i in range(256)]


def _ranks(data: bytes, source: str) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        match = _LINE.fullmatch(line)
        if match is None and line:
            raise ModelError(f"{source}: line {number} is no token with its rank.")
        if match is not None:
            ranks[_decode(match[1], source)] = int(match[2])
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ModelError(f"{source}: the ranks are not 0, 1, 2, ...")
    return ranks


def _decode(text: bytes | str, source: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise ModelError(f"{source}: holds a token that is no base64.") from None


def read_tekken(content: Mapping[str, Any], source: str) -> RankVocabulary:
    """Control tokens take the first ids, the others follow by rank up to the stated size."""
    try:
        config = content["config"]
        pattern, size = str(config["pattern"]), int(config["default_vocab_size"])
        count = int(config["default_num_special_tokens"])
        entries = [(int(entry["rank"]), entry["token_bytes"]) for entry in content["vocab"]]
        listed = content.get("special_tokens")
        special = dict(enumerate(_TEKKEN_SPECIAL))
        if listed is not None:
            special = {int(entry["rank"]): str(entry["token_str"]) for entry in listed}
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ModelError(f"{source}: not a sound tekken vocabulary: {error!r}.") from None
    kept = sorted((entry for entry in entries if entry[0] < size - count), key=lambda entry: entry[0])
    sound = len(kept) == size - count > 0 and [rank for rank, _ in kept] == list(range(size - count))
    if not sound or not len(special) <= count <= size or not all(0 <= i < count for i in special):
        raise ModelError(f"{source}: the ranks are not those of {size} tokens with {count} control tokens.")
    special = {i: special.get(i, f"<SPECIAL_{i}>") for i in range(count)}
    tokens = {_decode(text, source): count + rank for rank, text in kept}
    return RankVocabulary(tokens, special, pattern, False, "<s>", ("</s>",))


def backend_from_ranks(vocabulary: RankVocabulary, source: str) -> Tokenizer:
    """Raises ModelError naming `source` when tokens are missing or written twice."""
    ids = {spell(token): i for token, i in vocabulary.tokens.items()}
    if len(ids) < 256 or any(bytes([byte]) not in vocabulary.tokens for byte in range(256)):
        raise ModelError(f"{source}: the vocabulary does not hold all single bytes.")
    merges = [(spell(left), spell(right)) for left, right in merges_by_rank(vocabulary.tokens)]
    texts = list(vocabulary.special.values())
    doubled = [text for text in texts if text in ids]
    ids |= {text: i for i, text in vocabulary.special.items()}
    if doubled or len(set(ids.values())) != len(vocabulary.tokens) + len(texts):
        raise ModelError(f"{source}: control tokens {_short(doubled)} and the vocabulary overlap.")
    try:
        backend = Tokenizer(models.BPE(ids, merges, ignore_merges=True))
        backend.pre_tokenizer = split(vocabulary.pattern)
    except Exception as error:  # the library raises nothing more specific
        raise ModelError(f"{source}: not a sound vocabulary: {str(error).splitlines()[0]}.") from None
    if vocabulary.composes:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    ordered = [vocabulary.special[i] for i in sorted(vocabulary.special)]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ordered])
    return backend


def _short(texts: Sequence[str]) -> str:
    return ", ".join(texts[:4]) + (", ..." if len(texts) > 4 else "")
