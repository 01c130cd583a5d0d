"""Token ids -> text, piece by piece.

Bytes of an unfinished character are held back; U+FFFD appears only once it is certain that bytes will never
become a character. The pieces joined are the same for every way of cutting the ids. Knows no stop rule.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmdeploy.text.tokenizer import Tokenizer


class Detokenizer:
    """Text of one growing sequence of output ids."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, printed: frozenset[int] = frozenset()
    ) -> None:
        """printed: control tokens that are text all the same."""
        self._bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids - printed if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # Sentencepiece vocabularies write the space before a word into the word; the text's first one is no
        # part of the text.
        self._strip = tokenizer.strips_first_space

    def feed(self, ids: Iterable[int]) -> str:
        """The text that these further ids make certain; may be empty. Raises IndexError on a negative id."""
        data = b"".join([self._bytes(token) for token in ids if token not in self._skipped])
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left at the end: "" or one U+FFFD for an unfinished character."""
        return self._decoder.decode(b"", final=True)
