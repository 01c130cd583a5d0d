"""A tokenizers.Tokenizer from the vocabulary, merges and settings in GGUF metadata.

Byte-level BPE only (`tokenizer.ggml.model` = gpt2). The file names how text is split before merging
(`tokenizer.ggml.pre`); the splitting rules are those of the models' own tokenizer.json files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from lmdeploy.errors import ModelError

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type

_CONTRACTION = "'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = _CONTRACTION + r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LINES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(*patterns: str) -> Any:
    """Each pattern in turn cuts the pieces that the one before left; then bytes become characters."""
    parts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence(
        [*parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _by_lines(digits: str) -> Any:
    return _split(f"(?i:{_CONTRACTION})|" + _LINES % digits)


_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "default": lambda: _split(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama-bpe": lambda: _by_lines("{1,3}"),
    "qwen2": lambda: _by_lines(""),
}
_PREFERS_WHOLE_WORDS = ("llama-bpe",)  # a word that is a token is not merged anew
_COMPOSES = ("qwen2",)  # Unicode normal form C first


def backend_from_gguf(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """Raises ModelError naming `source` when the vocabulary is missing, damaged or of another kind."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(
            f"{source}: tokenizer kind {kind!r} is not supported (supported: gpt2, byte-level BPE)."
        )
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        supported = ", ".join(_PRE_TOKENIZERS)
        raise ModelError(f"{source}: pre-tokenizer {pre!r} is not supported (supported: {supported}).")
    tokens = _strings(metadata, "tokenizer.ggml.tokens", source)
    merges = [_merge(entry, source) for entry in _strings(metadata, "tokenizer.ggml.merges", source)]
    backend = _byte_level_bpe({token: i for i, token in enumerate(tokens)}, merges, pre, source)
    _mark_added(backend, tokens, metadata, source)
    _add_markers(backend, tokens, metadata, pre, source)
    return backend


def _byte_level_bpe(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], pre: str, source: str
) -> Tokenizer:
    try:
        model = models.BPE(vocabulary, merges, ignore_merges=pre in _PREFERS_WHOLE_WORDS)
    except Exception as error:  # the library raises nothing more specific
        raise ModelError(f"{source}: vocabulary and merges do not fit together: {error}.") from None
    backend = Tokenizer(model)
    if pre in _COMPOSES:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
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


def _mark_added(backend: Tokenizer, tokens: list[str], metadata: Mapping[str, Any], source: str) -> None:
    types = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens) or isinstance(types[0], str):
        raise ModelError(f"{source}: tokenizer.ggml.token_type does not have one entry per token.")
    pairs = list(zip(tokens, [int(kind) for kind in types], strict=True))
    control = [
        AddedToken(t, special=True, normalized=False) for t, kind in pairs if kind in (_UNKNOWN, _CONTROL)
    ]
    plain = [AddedToken(t, normalized=False) for t, kind in pairs if kind == _USER_DEFINED]
    backend.add_special_tokens(control)
    backend.add_tokens(plain)


def _add_markers(
    backend: Tokenizer, tokens: list[str], metadata: Mapping[str, Any], pre: str, source: str
) -> None:
    """Begin and end markers that encoding with special tokens adds."""
    wanted = {
        "bos": metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"),
        "eos": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    named = {kind: token_id(metadata, kind, len(tokens), source) for kind, on in wanted.items() if on}
    present = {kind: tokens[i] for kind, i in named.items() if i is not None}
    if present:
        template = [
            *([present["bos"]] if "bos" in present else []),
            "$A",
            *([present["eos"]] if "eos" in present else []),
        ]
        pairs = [(token, tokens.index(token)) for token in present.values()]
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=pairs)


def token_id(metadata: Mapping[str, Any], kind: str, size: int, source: str) -> int | None:
    """`tokenizer.ggml.{kind}_token_id`, or None when the file names none; ModelError when it is no token."""
    value = metadata.get(f"tokenizer.ggml.{kind}_token_id")
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < size:
        raise ModelError(
            f"{source}: tokenizer.ggml.{kind}_token_id is {value!r}, but there are {size} tokens."
        )
    return value
