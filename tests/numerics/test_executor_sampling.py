"""Sampling inside each executor against the same rules in numpy float64.

The rows come from a tiny model whose logits are returned beside the draws.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from executors import EXECUTORS, fill_cache, make_executor
from native_case import NewTokens, make_batch, samples, with_tensor
from native_llama import llama
from sampling_reference import changed_logits, distribution, draw, log_softmax, philox, uniform

from lmdeploy.engine.batch import StepResult
from lmdeploy.pytorch.sampling import philox4x32
from lmdeploy.turbomind import _turbomind

VOCAB, TOKENS = 3000, 64
rng = np.random.default_rng(5)
IDS = rng.integers(0, VOCAB, TOKENS).astype(np.int32)
BLOCKS = np.arange(TOKENS // 16, dtype=np.int32)


@pytest.fixture(scope="module", params=EXECUTORS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def executor(kind: str) -> Any:
    _, spec, tensors = llama(vocab_size=VOCAB)
    return make_executor(kind, spec, tensors)


@pytest.fixture(scope="module")
def logits(executor: Any) -> npt.NDArray[np.float32]:
    result = run(executor, range(TOKENS), want_logits=True)
    rows = np.array([result.logits[i] for i in range(TOKENS)])
    assert rows.std(1).min() > 0.5
    return rows


def run(executor: Any, tokens: Any, **columns: Any) -> StepResult:
    result = executor.execute(make_batch([NewTokens(IDS, 0, BLOCKS)], samples(tokens, **columns)))
    assert isinstance(result, StepResult)
    return result


# Known answers of Random123 1.x (kat_vectors, philox 4x32 10 rounds).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_known_answers(counter: Any, key: Any, words: Any) -> None:
    assert tuple(_turbomind.philox4x32(list(counter), list(key))) == words
    assert philox4x32(counter, key) == words
    assert philox(counter, key) == words


@pytest.mark.parametrize("temperature", [0.0, 1e-7, 9e-6])
def test_greedy_takes_the_largest(executor: Any, logits: Any, temperature: float) -> None:
    result = run(executor, range(TOKENS), temperature=temperature, seed=3)
    assert result.finite.all()
    assert result.token_ids.tolist() == logits.argmax(1).tolist()


FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "hot": {"temperature": 2.0},
    "cold": {"temperature": 0.05},
    "top_k": {"top_k": 20},
    "top_k of one": {"top_k": 1},
    "top_k of most": {"top_k": 2500, "temperature": 3.0},
    "top_k of most, and top_p": {"top_k": 2900, "top_p": 0.97, "temperature": 3.0},
    "top_k beyond the vocabulary": {"top_k": 10**6},
    "top_p": {"top_p": 0.8},
    "narrow top_p": {"top_p": 0.01},
    "wide top_p": {"top_p": 0.9999, "temperature": 2.0},
    "flat top_p": {"top_p": 0.95, "temperature": 20.0},
    "min_p": {"min_p": 0.1},
    "min_p of one": {"min_p": 1.0},
    "all": {"top_k": 50, "top_p": 0.9, "min_p": 0.05, "temperature": 0.7},
    "top_k and min_p": {"top_k": 300, "min_p": 0.2, "temperature": 1.5},
    "top_p and min_p": {"top_p": 0.95, "min_p": 0.02, "temperature": 1.5},
}


@pytest.mark.parametrize("name", FILTERS)
def test_draws_equal_the_reference(executor: Any, logits: Any, name: str) -> None:
    options = {"temperature": 1.0, **FILTERS[name]}
    for round_ in range(4):
        seeds = [(1 << 63) + 977 * i + round_ for i in range(TOKENS)]
        positions = [i * 1001 + round_ for i in range(TOKENS)]
        result = run(executor, range(TOKENS), seed=np.array(seeds, np.uint64), position=positions, **options)
        wanted = [
            draw(distribution(row, **options), uniform(s, p))
            for row, s, p in zip(logits.astype(np.float64), seeds, positions, strict=True)
        ]
        assert result.token_ids.tolist() == wanted


@pytest.mark.parametrize("options", [{}, {"top_k": 12}, {"top_p": 0.7}, {"min_p": 0.3}])
def test_frequencies_follow_the_distribution(executor: Any, logits: Any, options: dict[str, Any]) -> None:
    """Chi-square over 4,096 draws from one row; the seeds are fixed, so the outcome is too."""
    draws = np.concatenate(
        [
            run(
                executor,
                [5] * TOKENS,
                temperature=0.4,
                seed=9,
                position=np.arange(TOKENS) + 64 * i,
                **options,
            ).token_ids
            for i in range(64)
        ]
    )
    wanted = distribution(logits[5].astype(np.float64), 0.4, **options) * len(draws)
    counts = np.bincount(draws, minlength=VOCAB)
    assert counts[wanted == 0].sum() == 0
    often = wanted >= 5
    observed = np.append(counts[often], counts[~often].sum())
    expected = np.append(wanted[often], wanted[~often].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    chi2, freedom = ((observed - expected) ** 2 / expected).sum(), len(expected) - 1
    assert chi2 < freedom + 4 * np.sqrt(2 * freedom) + 4


def test_a_seeded_draw_ignores_its_neighbours(executor: Any) -> None:
    """The same seed and position beside other samples, which differ every time."""
    alone = run(executor, [40], temperature=0.8, seed=42, position=7).token_ids[0]
    for place in range(5):
        seeds, positions = np.arange(8) + 100 * place, np.arange(8) * (place + 1)
        temperature = np.full(8, 1.3)
        seeds[place], positions[place], temperature[place] = 42, 7, 0.8
        tokens = np.arange(8) + 40 - place
        result = run(executor, tokens, temperature=temperature, seed=seeds, position=positions)
        assert result.token_ids[place] == alone


def test_penalties_and_bias_equal_the_reference(executor: Any, logits: Any) -> None:
    """Repetition acts once per distinct id, on prompt and output; the others on the output only."""
    history = [{int(i): int(i) % 4 for i in rng.choice(VOCAB, 40, replace=False)} for _ in range(TOKENS)]
    bias = [{int(row.argmax()): -np.inf, int(i): 2.5} for row, i in zip(logits, IDS, strict=True)]
    for row, seen in zip(logits, history, strict=True):
        seen.update({int(i): 3 for i in np.argsort(row)[-12:]})  # likely ids, so that it matters
    options = {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.1}
    result = run(executor, range(TOKENS), history=history, bias=bias, temperature=0.5, seed=1, **options)
    greedy = run(executor, range(TOKENS), history=history, bias=bias, **options)
    plain = run(executor, range(TOKENS))
    for i, row in enumerate(logits):
        x = changed_logits(row, bias[i], history[i], 1.3, 0.2, 0.1)
        assert result.token_ids[i] == draw(distribution(x, 0.5), uniform(1, 0))
        assert greedy.token_ids[i] == x.argmax()
    assert (greedy.token_ids != plain.token_ids).mean() > 0.5


def test_penalties_stay_with_their_row(executor: Any, logits: Any) -> None:
    """Every other row has an overwhelming penalty; the rows without are as if alone."""
    top = logits.argmax(1)
    history = [{int(t): 80} if i % 2 else {} for i, t in enumerate(top)]
    result = run(
        executor, range(TOKENS), history=history, frequency_penalty=[2.0 * (i % 2) for i in range(TOKENS)]
    )
    assert (result.token_ids == top).tolist() == [i % 2 == 0 for i in range(TOKENS)]


def test_logprobs_are_of_the_raw_logits(executor: Any, logits: Any) -> None:
    bias = [{int(row.argmax()): -np.inf} for row in logits]
    history = [{int(row.argsort()[-2]): 1} for row in logits]
    options: dict[str, Any] = dict(bias=bias, history=history, presence_penalty=1.0, temperature=0.3)
    counts = [i % 21 for i in range(TOKENS)]
    result = run(executor, range(TOKENS), logprobs=counts, top_k=1, want_logits=True, **options)
    assert result.top_ids.shape == (TOKENS, 20)
    for i, row in enumerate(logits):
        wanted, order = log_softmax(row), np.lexsort((np.arange(VOCAB), -row))
        assert result.logits[i].tobytes() == row.tobytes()
        assert result.logprob[i] == pytest.approx(wanted[result.token_ids[i]], abs=2e-5)
        assert result.top_ids[i].tolist() == [*order[: counts[i]], *[-1] * (20 - counts[i])]
        np.testing.assert_allclose(result.top_logprobs[i, : counts[i]], wanted[order[: counts[i]]], atol=2e-5)
    assert np.isfinite(result.top_logprobs).all()
    assert run(executor, [1]).logprob[0] == 0


def test_scoring_given_tokens(executor: Any, logits: Any) -> None:
    targets = np.append(IDS[1:], 7).astype(np.int32)
    result = run(executor, range(TOKENS), target_ids=targets, logprobs=0, temperature=1.0)
    assert result.token_ids.tolist() == targets.tolist()
    wanted = [log_softmax(row)[t] for row, t in zip(logits, targets, strict=True)]
    np.testing.assert_allclose(result.logprob, wanted, atol=2e-5)


def test_every_token_banned_is_no_result(executor: Any) -> None:
    bias = [{}, dict.fromkeys(range(VOCAB), -np.inf), {}]
    result = run(executor, [3, 4, 5], bias=bias, temperature=1.0)
    assert result.finite.tolist() == [True, False, True]


def test_logprobs_have_a_floor(kind: str) -> None:
    """One token's logits are made huge through the head."""
    _, spec, tensors = llama(vocab_size=200)
    head = np.array(tensors["lm_head.weight"])
    head[3] *= 1e4
    large = make_executor(kind, spec, with_tensor(tensors, "lm_head.weight", head))
    ids = np.arange(20, dtype=np.int32)
    columns = samples(range(20), logprobs=20, target_ids=5, want_logits=True)
    result = large.execute(make_batch([NewTokens(ids, 0, BLOCKS)], columns))
    assert result.finite.all()
    assert result.logprob.min() == -9999.0
    assert result.top_logprobs.min() == -9999.0
    assert np.isfinite(result.top_logprobs).all()


def test_a_row_that_is_not_finite_stays_alone(kind: str) -> None:
    """One row's cached tokens are NaN; its neighbours in the batch draw and score as ever."""
    _, spec, tensors = llama(vocab_size=200)
    executor = make_executor(kind, spec, tensors)
    fill_cache(executor, np.nan)
    contexts = [4 if i == 7 else 0 for i in range(10)]
    rows = [NewTokens(np.array([i, i], np.int32), c, np.array([i], np.int32)) for i, c in enumerate(contexts)]
    columns = samples(range(1, 20, 2), temperature=1.0, logprobs=2)
    result = executor.execute(make_batch(rows, columns))
    assert result.finite.tolist() == [i != 7 for i in range(10)]
    assert np.isfinite(result.logprob).all()
    assert np.isfinite(result.top_logprobs).all()


def test_equal_logits_are_kept_by_id(kind: str) -> None:
    """All alike: the first ids are the most likely ones, and a mass takes a prefix of the vocabulary."""
    _, spec, tensors = llama(vocab_size=200)
    flat = with_tensor(tensors, "lm_head.weight", np.zeros_like(tensors["lm_head.weight"]))
    executor = make_executor(kind, spec, flat)
    columns = samples(range(TOKENS), temperature=1.0, top_p=0.5, position=range(TOKENS))
    ids = IDS % 200
    drawn = executor.execute(make_batch([NewTokens(ids, 0, BLOCKS)], columns)).token_ids
    uniforms = [uniform(0, position) for position in range(TOKENS)]
    assert drawn.tolist() == [draw(distribution(np.zeros(200), 1.0, top_p=0.5), u) for u in uniforms]
    assert drawn.max() < 100
