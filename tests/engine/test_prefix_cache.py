"""Which prefixes are shared, which never are, and who waits for whom."""

from __future__ import annotations

import pytest
from engine_cases import drain, engine, request, run, tokens

from lmdeploy.engine import prefix_cache
from lmdeploy.engine.loop import EngineOptions
from lmdeploy.engine.prefix_cache import block_key, root_key

PROMPT = list(range(100, 110))  # two full blocks of 4 and a rest


def cached(first: list[int], second: list[int], **fields: str) -> int:
    """Prompt tokens that a second request takes from the cache after a first one has ended."""
    eng = engine()
    eng.add(request("a", first, 1))
    drain(eng)
    eng.add(request("b", second, 1, **fields))
    return drain(eng)["b"][0].cached_tokens


def test_full_blocks_of_a_prompt_are_found_again() -> None:
    assert cached(PROMPT, PROMPT) == 8
    assert cached(PROMPT, [*PROMPT[:6], 1, 2, 3]) == 4
    assert cached(PROMPT, PROMPT[:3]) == 0


def test_at_least_one_prompt_token_is_computed() -> None:
    assert cached(PROMPT[:8], PROMPT[:8]) == 4
    assert cached(PROMPT[:4], PROMPT[:4]) == 0


def test_blocks_of_the_output_are_found_again() -> None:
    eng = engine()
    eng.add(request("a", PROMPT, 7))
    answer = tokens(drain(eng)["a"])
    eng.add(request("b", [*PROMPT, *answer, 5], 1))
    # 17 tokens so far, but the last one was never computed: four full blocks.
    assert drain(eng)["b"][0].cached_tokens == 16


def test_pairs_with_equal_polynomial_hash_have_different_keys() -> None:
    # 31 * a + b is the same for (a, b) and (a + 1, b - 31).
    pairs = [[40, 80, 7, 7], [41, 49, 7, 7], [9, 111, 7, 7]]
    keys = {block_key(root_key(""), bytes(pair)) for pair in pairs}
    assert len(keys) == 3
    assert cached([*pairs[0], 1], [*pairs[1], 1]) == 0
    assert cached([71, 79, 7, 7, 1], [40, 80, 7, 7, 1]) == 0


def test_a_different_first_token_shares_nothing() -> None:
    assert cached(PROMPT, [1, *PROMPT[1:]]) == 0


def test_salts_are_kept_apart_and_by_kind() -> None:
    assert cached(PROMPT, PROMPT, cache_salt="x") == 0
    assert root_key("x") != b"adapter\0x"
    assert block_key(root_key("x"), b"1234") != block_key(b"adapter\0x", b"1234")
    assert block_key(b"ab", b"cd") != block_key(b"abc", b"d")


def test_output_with_cache_equals_output_without() -> None:
    requests = [request(f"r{i}", [*PROMPT[: 4 + i], i], 6) for i in range(6)]
    off = run(*requests, options=EngineOptions(enable_prefix_caching=False))
    on = run(*requests)
    assert {k: tokens(v) for k, v in on.items()} == {k: tokens(v) for k, v in off.items()}
    assert all(event.cached_tokens == 0 for events in off.values() for event in events)


def test_a_collision_of_keys_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [request("a", [1, 2, 3, 4, 5]), request("b", [5, 6, 7, 8, 9])]
    alone = {r.request_id: tokens(run(r)[r.request_id]) for r in requests}
    monkeypatch.setattr(prefix_cache, "block_key", lambda parent, tokens: b"the same for all")
    together = run(*requests)
    assert {k: tokens(v) for k, v in together.items()} == alone
    assert together["b"][0].cached_tokens == 0


def test_identical_prompts_in_flight_are_computed_once() -> None:
    eng = engine()
    for i in range(8):
        eng.add(request(f"r{i}", PROMPT, 1))
    events = drain(eng)
    assert [events[f"r{i}"][0].cached_tokens for i in range(8)] == [0] + [8] * 7
    totals = eng.stats().totals
    assert totals.computed_tokens == 10 + 7 * 2
    assert totals.awaited_prefixes == 7


def test_waiting_for_a_prefix_holds_up_nobody_else() -> None:
    eng = engine(EngineOptions(max_prefill_token_num=8))
    long = list(range(200, 214))
    eng.add(request("owner", long, 2))
    eng.step()
    eng.add(request("same", long, 2))
    eng.add(request("other", [1, 2], 2))
    order = [event.request_id for event in (e for _ in range(30) for e in eng.step())]
    assert order.index("other") < order.index("same")
    assert eng.stats().totals.computed_tokens == (14 + 1) + (2 + 1) + (2 + 1)


@pytest.mark.parametrize("ending", ["abort", "poison"])
def test_when_the_one_computing_goes_the_one_waiting_takes_over(ending: str) -> None:
    eng = engine(EngineOptions(max_prefill_token_num=4), poison_id=99 if ending == "poison" else -1)
    shared = list(range(100, 120))
    eng.add(request("owner", [*shared, 99], 2))
    eng.step()
    eng.add(request("same", [*shared, 1], 2))
    eng.step()
    if ending == "abort":
        eng.abort("owner")
    events = drain(eng)
    assert events["owner"][-1].finish_reason == ("abort" if ending == "abort" else "error")
    assert tokens(events["same"]) == tokens(run(request("same", [*shared, 1], 2))["same"])


def test_bad_blocks_are_withdrawn() -> None:
    eng = engine(poison_id=102)
    for name in ("a", "b"):
        eng.add(request(name, PROMPT, 2))
        assert [event.finish_reason for event in drain(eng)[name]] == ["error"]
    assert eng.stats().totals.cached_tokens == 0
    assert eng.stats().blocks_free == 64
