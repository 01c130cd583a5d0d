"""The fake executor notices a batch that breaks the contract; its answers depend on all they should."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_cases import request, run, tokens

from lmdeploy.engine.batch import Batch, Packer
from lmdeploy.engine.fake import FakeExecutor
from lmdeploy.engine.request import Sequence


def packed(*rows: tuple[list[int], int, list[int]]) -> Batch:
    """A batch of rows (prompt, tokens already computed, blocks)."""
    planned = []
    for prompt, computed, blocks in rows:
        seq = Sequence(request("a", prompt), 1)
        seq.append_blocks(blocks)
        seq.num_computed = computed
        planned.append((seq, len(prompt) - computed))
    return Packer(4).pack(planned)


def fake() -> FakeExecutor:
    return FakeExecutor(4, 8, max_step_tokens=16, max_rows=2)


def test_every_token_of_the_prefix_counts() -> None:
    answers = set()
    for changed in range(10):
        prompt = [1] * 10
        prompt[changed] = 2
        answers.add(tuple(tokens(run(request("a", prompt, 4))["a"])))
    assert len(answers) == 10


def test_script_and_hook() -> None:
    seen: list[int] = []
    events = run(request("a", [1], 4), script=(5, 6, 7), on_step=lambda batch: seen.append(batch.num_tokens))
    assert tokens(events["a"])[:3] == [5, 6, 7]
    assert seen == [1, 1, 1, 1]


def test_a_row_must_have_a_token_to_compute() -> None:
    batch = packed(([1, 2], 0, [0]), ([3, 4], 0, [1]))
    with pytest.raises(AssertionError, match="without a token"):
        fake().execute(replace(batch, row_start=np.array([0, 4, 4], np.int32)))


@pytest.mark.parametrize(
    ("batch", "complaint"),
    [
        (packed(([1, 2], 0, [9])), "out of range"),
        (packed(([2000], 0, [1])), "vocabulary"),
        (packed(([1], 0, [1]), ([1], 0, [2]), ([1], 0, [3])), "too many rows"),
        (packed(([1] * 17, 0, [1, 2, 3, 4, 5])), "too many"),
        (packed(([1], 0, [1]), ([2], 0, [1])), "in another row"),
        (packed(([1] * 8, 0, [1, 1])), "twice"),
        (packed(([1, 2, 3], 2, [1])), "written again"),
    ],
)
def test_complaints(batch: Batch, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        fake().execute(batch)


def test_reading_what_nobody_wrote_is_noticed() -> None:
    executor = fake()
    executor.execute(packed(([1, 2, 3], 0, [1])))
    with pytest.raises(AssertionError, match="unwritten"):
        executor.execute(packed(([1, 2, 3, 4, 5], 4, [1, 2])))


def test_writing_into_a_full_shared_block_is_noticed() -> None:
    executor = fake()
    executor.execute(packed(([1, 2, 3, 4, 5], 0, [1, 2])))
    with pytest.raises(AssertionError, match="written again"):
        executor.execute(packed(([1, 2, 3, 4, 6], 3, [1, 3])))
