"""What a planned step looks like to an executor (penalty history; arrays never written again)."""

from __future__ import annotations

from collections import Counter

import numpy as np
from engine_cases import request

from lmdeploy.engine.batch import Packer
from lmdeploy.engine.request import PenaltyHistory, Request, Sequence
from lmdeploy.engine.stopping import update_bias


def sequence(r: Request, computed: int = 0, blocks: tuple[int, ...] = (0, 1, 2, 3)) -> Sequence:
    seq = Sequence(r, 1)
    seq.append_blocks(list(blocks))
    seq.num_computed = computed
    update_bias(seq, 1000)
    return seq


def test_prefill_and_decode_rows_share_one_ragged_batch() -> None:
    decode = sequence(request("a", range(9)), computed=8, blocks=(7, 3, 5))
    chunk = sequence(request("b", range(20, 30)), computed=4, blocks=(1, 2, 9))
    batch = Packer(4).pack([(decode, 1), (chunk, 3)])
    assert batch.token_ids.tolist() == [8, 24, 25, 26]
    assert batch.row_start.tolist() == [0, 1, 4]
    assert batch.context_len.tolist() == [8, 4]
    assert batch.block_start.tolist() == [0, 3, 5]
    assert batch.block_ids.tolist() == [7, 3, 5, 1, 2]
    assert batch.samples.token_index.tolist() == [0]
    assert (batch.num_tokens, batch.num_rows) == (4, 2)


def test_columns_carry_every_field_with_its_type() -> None:
    fields = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.75,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "seed": 2**64 - 1,
        "logprobs": 2,
    }
    plain, full = sequence(request("a", [1, 2])), sequence(request("b", [3, 4], want_logits=True, **fields))
    s = Packer(4).pack([(plain, 2), (full, 2)]).samples
    for name, value in fields.items():
        assert getattr(s, name)[1] == value, name
        assert getattr(s, name).flags.c_contiguous
    assert s.want_logits.tolist() == [False, True]
    assert s.logprobs.tolist() == [-1, 2]
    assert s.target_ids.tolist() == [-1, -1]
    types = {
        name: getattr(s, name).dtype for name in ("temperature", "top_k", "seed", "position", "want_logits")
    }
    assert types == {
        "temperature": np.float32,
        "top_k": np.int32,
        "seed": np.uint64,
        "position": np.int64,
        "want_logits": np.bool_,
    }


def test_position_counts_generated_tokens() -> None:
    seq = sequence(request("a", [1, 2, 3]))
    seq.append_token(9)
    seq.append_token(8)
    assert Packer(4).pack([(seq, 5)]).samples.position.tolist() == [2]


def test_scored_prompt_positions_become_neutral_samples() -> None:
    seq = sequence(request("a", [5, 6, 7, 8], prompt_logprobs=3, temperature=0.9, presence_penalty=1.0))
    s = Packer(4).pack([(seq, 4)]).samples
    assert s.token_index.tolist() == [0, 1, 2, 3]
    assert s.target_ids.tolist() == [6, 7, 8, -1]
    np.testing.assert_array_equal(s.temperature, np.float32([0, 0, 0, 0.9]))
    assert s.logprobs.tolist() == [3, 3, 3, -1]
    assert s.history_start.tolist() == [0, 0, 0, 0, 4]


def test_history_is_packed_only_for_samples_with_a_penalty() -> None:
    plain = sequence(request("a", [1] * 8))
    penalised = sequence(request("b", [4, 2, 2, 4], repetition_penalty=1.1))
    for token in (7, 2, 7):
        penalised.append_token(token)
    s = Packer(4).pack([(plain, 8), (penalised, 7)]).samples
    assert s.history_start.tolist() == [0, 0, 3]
    assert dict(zip(s.history_ids.tolist(), s.history_counts.tolist(), strict=True)) == {2: 1, 4: 0, 7: 2}


def test_history_counts_each_distinct_id_once() -> None:
    random = np.random.default_rng(1)
    prompt, output = random.integers(0, 50, 80), random.integers(0, 90, 400).tolist()
    history = PenaltyHistory(prompt.astype(np.int32))
    for token in output:
        history.add(token)
    ids, counts = history.view()
    expected = dict.fromkeys(prompt.tolist(), 0) | Counter(output)
    assert len(ids) == len(expected)
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == expected
    same = PenaltyHistory(np.full(80, 3, np.int32))
    assert [part.tolist() for part in same.view()] == [[3], [0]]


def test_bias_and_bans_are_ragged() -> None:
    biased = sequence(request("a", [1], logit_bias=((5, -1.5), (6, 2.0))))
    plain = sequence(request("b", [1]))
    banned = sequence(request("c", [1], stop_ids=frozenset({9}), min_new_tokens=2, logit_bias=((9, 3.0),)))
    s = Packer(4).pack([(biased, 1), (plain, 1), (banned, 1)]).samples
    assert s.bias_start.tolist() == [0, 2, 2, 3]
    assert s.bias_ids.tolist() == [5, 6, 9]
    assert s.bias_values.tolist() == [-1.5, 2.0, -np.inf]


def test_a_batch_stays_as_it_was_while_the_engine_goes_on() -> None:
    seq = sequence(request("a", [1, 2, 3], repetition_penalty=1.2))
    packer = Packer(4)
    first = packer.pack([(seq, 3)])
    kept = [column.copy() for column in (first.token_ids, first.block_ids, first.samples.history_counts)]
    seq.num_computed = 3
    seq.append_token(3)
    second = packer.pack([(seq, 1)])
    now = (first.token_ids, first.block_ids, first.samples.history_counts)
    assert all((a == b).all() for a, b in zip(kept, now, strict=True))
    assert second.samples.temperature is first.samples.temperature
    assert second.token_ids.tolist() == [3]


def test_tokens_and_blocks_grow_with_the_sequence() -> None:
    seq = sequence(request("a", [1]), blocks=())
    for i in range(300):
        seq.append_token(i)
        seq.append_blocks([i])
    assert seq.tokens[: seq.length].tolist() == [1, *range(300)]
    assert seq.drop_blocks() == list(range(300))
    assert (seq.num_blocks, seq.num_computed) == (0, 0)
