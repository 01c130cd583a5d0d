"""A tokenizers.Tokenizer from the vocabulary, merges or scores, and settings in GGUF metadata.

Two kinds (`tokenizer.ggml.model`): gpt2, byte-level BPE whose file names how text is cut
(`tokenizer.ggml.pre`), and llama, SentencePiece BPE given by scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from lmdeploy.errors import ModelError
from lmdeploy.models.fields import shown
from lmdeploy.text.conversion_cache import content_key, converted
from lmdeploy.text.pieces import CONTROL, UNKNOWN, USER_DEFINED, Pieces, add_markers, backend_from_pieces
from lmdeploy.text.split_rules import RULES, Rule

_KINDS = "gpt2 (byte-level BPE) and llama (SentencePiece BPE)"


def backend_from_gguf(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """Raises ModelError naming `source` when the vocabulary is missing, damaged or of another kind."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "llama":
        return _from_pieces(metadata, source)
    if kind != "gpt2":
        raise ModelError(f"{source}: tokenizer kind {kind!r} is not supported (supported: {_KINDS}).")
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in RULES:
        supported = ", ".join(RULES)
        raise ModelError(f"{source}: pre-tokenizer {pre!r} is not supported (supported: {supported}).")
    tokens = _strings(metadata, "tokenizer.ggml.tokens", source)
    kinds = _kinds(metadata, len(tokens), source)
    merges = [_merge(entry, source) for entry in _strings(metadata, "tokenizer.ggml.merges", source)]
    backend = _byte_level_bpe(tokens, merges, RULES[pre], source)
    pairs = list(zip(tokens, kinds, strict=True))
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, kind in pairs if kind in (UNKNOWN, CONTROL)]
    )
    backend.add_tokens([AddedToken(t, normalized=False) for t, kind in pairs if kind == USER_DEFINED])
    return _with_markers(backend, metadata, tokens, RULES[pre].adds_begin, source)


def _from_pieces(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """Finding the merges takes a second, so the result is kept."""
    tokens = _strings(metadata, "tokenizer.ggml.tokens", source)
    kinds = _kinds(metadata, len(tokens), source)
    scores = metadata.get("tokenizer.ggml.scores")
    sound = isinstance(scores, list) and all(isinstance(score, int | float) for score in scores)
    if not isinstance(scores, list) or not sound or len(scores) != len(tokens):
        raise ModelError(f"{source}: tokenizer.ggml.scores does not have one entry per token.")
    prefix = "every" if _flag(metadata, "add_space_prefix", True, source) else "none"
    pieces = Pieces(tokens, scores, kinds, prefix=prefix, raw_user_defined=True)
    key = content_key("gguf pieces", tokens, scores, kinds, prefix)
    backend = converted(key, lambda: backend_from_pieces(pieces, source))
    return _with_markers(backend, metadata, tokens, True, source)


def _byte_level_bpe(tokens: list[str], merges: list[tuple[str, str]], rule: Rule, source: str) -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        model = models.BPE(vocabulary, merges, ignore_merges=rule.whole_words)
    except Exception as error:  # the library raises nothing more specific
        raise ModelError(
            f"{source}: vocabulary and merges do not fit together: {str(error).splitlines()[0]}."
        ) from None
    backend = Tokenizer(model)
    if rule.composes:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = rule.make()
    backend.decoder = decoders.ByteLevel()
    return backend


def _strings(metadata: Mapping[str, Any], key: str, source: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(entry, str) for entry in value):
        raise ModelError(f"{source}: {key} is missing or is no list of strings.")
    return value


def _merge(entry: str, source: str) -> tuple[str, str]:
    left, _, right = entry.partition(" ")
    if not left or not right or " " in right:
        raise ModelError(f"{source}: tokenizer.ggml.merges holds {entry!r}, which is no pair.")
    return left, right


def _kinds(metadata: Mapping[str, Any], count: int, source: str) -> list[int]:
    types = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != count or not all(isinstance(k, int) for k in types):
        raise ModelError(f"{source}: tokenizer.ggml.token_type does not have one entry per token.")
    for i, kind in enumerate(types):
        if kind not in _TYPES:
            raise ModelError(
                f"{source}: tokenizer.ggml.token_type is {kind} for token {i}; {_TYPES[0]} to {_TYPES[-1]} is"
                " expected."
            )
    return types


_TYPES = range(7)  # undefined, normal, unknown, control, user-defined, unused, byte


def _flag(metadata: Mapping[str, Any], name: str, default: bool, source: str) -> bool:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise ModelError(f"{source}: tokenizer.ggml.{name} is {shown(value)}; true or false is expected.")
    return value


def _with_markers(
    backend: Tokenizer, metadata: Mapping[str, Any], tokens: list[str], adds_begin: bool, source: str
) -> Tokenizer:
    """Encoding with special tokens puts the markers before and behind a text that the file asks for."""
    wanted = {
        "bos": _flag(metadata, "add_bos_token", adds_begin, source),
        "eos": _flag(metadata, "add_eos_token", False, source),
    }
    found = {kind: token_id(metadata, kind, len(tokens), source) for kind, on in wanted.items() if on}
    texts = {kind: tokens[i] for kind, i in found.items() if i is not None}
    begin, end = ([texts[kind]] if kind in texts else [] for kind in wanted)
    add_markers(backend, begin, end, {tokens[i]: i for i in found.values() if i is not None})
    return backend


def token_id(metadata: Mapping[str, Any], kind: str, size: int, source: str) -> int | None:
    """`tokenizer.ggml.{kind}_token_id`, or None when the file names none; ModelError when it is no token."""
    value = metadata.get(f"tokenizer.ggml.{kind}_token_id")
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < size:
        raise ModelError(
            f"{source}: tokenizer.ggml.{kind}_token_id is {value!r}, but there are {size} tokens."
        )
    return value
