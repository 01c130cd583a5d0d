"""Merges recovered from a vocabulary that only ranks its tokens.

SentencePiece BPE and tiktoken join, at each step, the two neighbours whose joined text has the best rank.
With every way of cutting a token in two as a merge of that token's rank, the tokenizers library does as
they do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Text = TypeVar("Text", str, bytes)


def merges_by_rank(ranks: Mapping[Text, int]) -> list[tuple[Text, Text]]:
    """Pairs of tokens that join to a token, best first. A lower rank is a better one."""
    merges: list[tuple[Text, Text]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        merges += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges
