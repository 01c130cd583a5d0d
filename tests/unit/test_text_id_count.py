"""The number of ids of a vocabulary, with and without gaps."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, models

from lmdeploy.text.sources import id_count


@pytest.mark.parametrize(
    ("ids", "added", "count"),
    [([0, 1, 2], 0, 3), ([0, 1, 2], 2, 5), ([0, 1, 7], 0, 8), ([3], 0, 4), ([0, 5], 1, 6), ([], 0, 0)],
)
def test_highest_id_and_one(ids: list[int], added: int, count: int) -> None:
    backend = Tokenizer(models.BPE({chr(97 + i): n for i, n in enumerate(ids)}, []))
    backend.add_special_tokens([AddedToken(f"<{i}>", special=True) for i in range(added)])
    highest = max([*backend.get_vocab().values(), *backend.get_added_tokens_decoder()], default=-1)
    assert id_count(backend) == highest + 1 >= count
