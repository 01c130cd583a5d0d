"""Text <-> token ids for one model, through the tokenizers library.

Owns the ids of a text, which of them end a turn, and the exact bytes of each token. Text given by users is
encoded with control tokens off unless asked. Knows no file format and no chat format.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path

import tokenizers

from lmdeploy.errors import ModelError, check_text
from lmdeploy.logging import get_logger
from lmdeploy.text.byte_alphabet import BYTE_OF
from lmdeploy.text.detokenize import Detokenizer
from lmdeploy.text.sources import id_count, read_source

MARK_NUMBER = 2  # characters of a mark that count; those before them are the secret
_LONG_TEXT = 4096  # characters; beyond it encoding leaves the interpreter lock to other threads
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Made by `load_tokenizer`. Safe to use from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        source: str,
        *,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        named_tokens: Mapping[str, str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend, self.source = backend, source
        self.bos_id = bos_id
        self.named_tokens = dict(
            named_tokens or {}
        )  # bos_token, eos_token, ... -> text, as templates use them
        added = backend.get_added_tokens_decoder()
        self._added = {i: token.content for i, token in added.items()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = id_count(backend)
        self.eos_ids = frozenset(i for i in eos_ids if 0 <= i < self.vocab_size)
        self._to_bytes, self.strips_first_space = _decoding(backend, source)
        self._known_bytes: dict[int, bytes] = {}

    def encode(self, text: str, add_special_tokens: bool = False, parse_special: bool = False) -> list[int]:
        """Ids of `text`.

        add_special_tokens: with the begin (and end) markers this model's tokenizer adds, never two begin
        markers in a row. parse_special: the text of a control token becomes that token; otherwise it is
        encoded like any other text. Raises RequestError when the text cannot be written as UTF-8.
        """
        if not parse_special and self.has_special(text):
            return self.encode_marked(text, add_special_tokens)
        return self._run(self._backend, text, add_special_tokens)

    def _run(self, backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        check_text(text, "prompt")
        if len(text) > _LONG_TEXT:
            ids = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        else:
            ids = backend.encode(text, add_special_tokens=add_special_tokens).ids
        doubled = add_special_tokens and len(ids) > 1 and ids[0] == ids[1] == self.bos_id
        return list(ids[1:] if doubled else ids)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence of ids; bytes that are no UTF-8 become U+FFFD."""
        detokenizer = Detokenizer(self, skip_special_tokens)
        return detokenizer.feed(ids) + detokenizer.finish()

    def token_bytes(self, token: int) -> bytes:
        """The exact bytes a token stands for; nothing for ids the tokenizer does not use (padding of the
        embedding). Raises IndexError on a negative id."""
        known = self._known_bytes.get(token)
        if known is not None:
            return known
        if token < 0:
            raise IndexError(f"token id {token} is negative")
        text = self._backend.id_to_token(token)
        if token in self._added:
            # Its text is plain, but for the blanks of pieces that stand for text.
            text = self._added[token]
            plain = token in self.special_ids or self._to_bytes is _byte_level_bytes
            value = text.encode() if plain else _space_bytes(text)
        else:
            value = b"" if text is None else self._to_bytes(text)
        self._known_bytes[token] = value
        return value

    def token_text(self, token: int) -> str:
        """What a token stands for, as text: U+FFFD for bytes that are no whole character."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def id_of(self, token: str) -> int | None:
        """The id of a token by its text in the vocabulary, or None."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def check_vocabulary(self, embedding_rows: int) -> None:
        """ModelError when an id of this tokenizer has no row in the model's embedding; a warning of one line
        when rows have no id (their tokens stand for no text)."""
        if self.vocab_size > embedding_rows:
            raise ModelError(
                f"{self.source}: the tokenizer has ids up to {self.vocab_size - 1}, but the model's embedding"
                f" has only {embedding_rows} rows: tokenizer and weights do not belong together."
            )
        if self.vocab_size < embedding_rows:
            get_logger().warning(
                "%s: the tokenizer has %d ids, the model's embedding %d rows; the last %d stand for no text",
                self.source,
                self.vocab_size,
                embedding_rows,
                embedding_rows - self.vocab_size,
            )

    # Control tokens in text that must not act as such: `special_pattern` finds them; `encode_marked` encodes
    # text whose real control tokens are written as marks that no text can contain.

    @cached_property
    def special_pattern(self) -> re.Pattern[str] | None:
        """Matches the text of any control token, longest first; None when there are none."""
        texts = sorted((self._added[i] for i in self.special_ids), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts))) if texts else None

    def has_special(self, text: str) -> bool:
        return self.special_pattern is not None and self.special_pattern.search(text) is not None

    @cached_property
    def marks(self) -> dict[str, str]:
        """Text of a control token -> its mark. Marks start with a secret, so that nobody can write one."""
        return make_marks(self._added[i] for i in sorted(self.special_ids))

    def encode_marked(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of `text`, in which `marks` are control tokens and all else is plain text."""
        return self._run(self._marked_backend, text, add_special_tokens)

    def prepare(self) -> None:
        """Make at once what the first text with a control token would wait for (a second or two)."""
        self._marked_backend  # noqa: B018

    @cached_property
    def _marked_backend(self) -> tokenizers.Tokenizer:
        """The same tokenizer with its control tokens renamed to their marks; all ids are as before."""
        description = json.loads(self._backend.to_str())
        for token in description["added_tokens"]:
            token["content"] = self.marks.get(token["content"], token["content"])
        model = description["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {self.marks.get(text, text): i for text, i in model["vocab"].items()}
        else:
            model["vocab"] = [[self.marks.get(text, text), score] for text, score in model["vocab"]]
        if model.get("unk_token") is not None:
            model["unk_token"] = self.marks.get(model["unk_token"], model["unk_token"])
        return tokenizers.Tokenizer.from_str(json.dumps(description))


def make_marks(texts: Iterable[str]) -> dict[str, str]:
    """A mark for each text: characters of private use, begun by a secret, so that nobody can write one.

    The string methods of templates (strip, upper, split, ...) leave marks alone.
    """
    first, size = 0xE000, 6400
    secret = "".join(chr(first + secrets.randbelow(size)) for _ in range(8))
    return {text: secret + chr(first + n // size) + chr(first + n % size) for n, text in enumerate(texts)}


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a model directory or a GGUF file. ModelError when missing, damaged or unsupported."""
    found = read_source(path)
    return Tokenizer(
        found.backend,
        found.source,
        bos_id=found.bos_id,
        eos_ids=found.eos_ids,
        named_tokens=found.named,
    )


def _decoding(backend: tokenizers.Tokenizer, source: str) -> tuple[Callable[[str], bytes], bool]:
    """(vocabulary text -> bytes, whether the text's first space is dropped), as the decoder says."""
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    steps = decoder.get("decoders", [decoder]) if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds:
        return _byte_level_bytes, False
    if "Metaspace" in kinds or "Replace" in kinds:
        metaspace = next((step for step in steps if step.get("type") == "Metaspace"), {})
        strip = "Strip" in kinds or metaspace.get("prepend_scheme", "never") != "never"
        return (_fallback_bytes if "ByteFallback" in kinds else _space_bytes), strip
    raise ModelError(
        f"{source}: decoder {kinds} is not supported (supported: ByteLevel, Metaspace, Replace)."
    )


def _byte_level_bytes(text: str) -> bytes:
    try:
        return bytes([BYTE_OF[char] for char in text])
    except KeyError:
        return text.encode()


def _space_bytes(text: str) -> bytes:
    return text.replace("▁", " ").encode()


def _fallback_bytes(text: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(byte[1], 16)]) if byte else _space_bytes(text)
