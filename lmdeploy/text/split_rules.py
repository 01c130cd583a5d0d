"""How byte-level vocabularies cut a text before merging, by the name GGUF files give the rule.

The patterns are those of the models' own tokenizer files. A family's vocabulary is no rule of its own: most
names here are aliases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, pre_tokenizers

_CONTRACTION = "'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = _CONTRACTION + r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

ONE_DIGIT = f"(?i:{_CONTRACTION})|{_WORD}|" + r"\p{N}" + _REST
THREE_DIGITS = f"(?i:{_CONTRACTION})|{_WORD}|" + r"\p{N}{1,3}" + _REST


def _by_case(ending: str, digits: str) -> str:
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{start}{_UPPER}*{_LOWER}+{ending}|{start}{_UPPER}+{_LOWER}*{ending}|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


@dataclass(frozen=True, slots=True)
class Rule:
    """whole_words: a word that is a token is not merged anew. composes: Unicode normal form C comes first.
    adds_begin: whether the begin marker is added where the file does not say."""

    make: Callable[[], Any]
    whole_words: bool = False
    composes: bool = False
    adds_begin: bool = False


def split(*patterns: str) -> Any:
    """Each pattern in turn cuts the pieces that the one before left; then bytes become characters."""
    parts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence(
        [*parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _digits() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


_LLAMA3 = Rule(lambda: split(THREE_DIGITS), whole_words=True, adds_begin=True)
_DIGITS, _GPT2_RULE = Rule(_digits), Rule(_gpt2)
_QWEN2 = Rule(lambda: split(ONE_DIGIT), composes=True)

RULES: dict[str, Rule] = {
    "default": Rule(lambda: split(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _GPT2_RULE,
    "phi-2": _GPT2_RULE,
    "olmo": _GPT2_RULE,
    "mpt": _GPT2_RULE,
    "falcon": Rule(lambda: split(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": Rule(_digits, composes=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": Rule(lambda: split(ONE_DIGIT)),
    "dbrx": Rule(lambda: split(THREE_DIGITS)),
    "smaug-bpe": Rule(lambda: split(THREE_DIGITS)),
    "chatglm-bpe": Rule(lambda: split(THREE_DIGITS)),
    "glm4": Rule(lambda: split(THREE_DIGITS), whole_words=True),
    "tekken": Rule(lambda: split(_by_case("", r"\p{N}")), whole_words=True, adds_begin=True),
    "gpt-4o": Rule(lambda: split(_by_case(f"(?i:{_CONTRACTION})?", r"\p{N}{1,3}"))),
}
