"""Attention over the paged cache of every kernel table against float64 on the values the cache holds."""

from __future__ import annotations

import kernel_cases as cases
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import TABLES, K

SPLIT = 512
NAN_HALF = 0x7E00


class Cache:
    """A filled cache and the float64 keys and values [tokens, kv heads, dim] that it stands for."""

    def __init__(self, t, tokens, kv_heads, dim, block_size, seed=0):
        rng = np.random.default_rng(seed)
        used = -(-tokens // block_size)
        self.native = K.KvCache(used + 2, kv_heads, block_size, dim)
        self.native.fill(NAN_HALF)
        self.blocks = rng.permutation(used + 2)[:used].astype(np.int32)
        self.keys = rng.standard_normal((tokens, kv_heads, dim)).astype(np.float32)
        self.values = rng.standard_normal((tokens, kv_heads, dim)).astype(np.float32)
        for token in range(tokens):
            block, slot = self.blocks[token // block_size], token % block_size
            for head in range(kv_heads):
                t.store_kv(self.native, head, block, slot, self.keys[token, head], self.values[token, head])
        self.keys = self.keys.astype(np.float16).astype(np.float64)
        self.values = self.values.astype(np.float16).astype(np.float64)


def reference(cache, kv_head, position, q, window=0, softcap=0.0):
    """float64 [rows, heads, dim]."""
    scores = np.einsum("rhd,td->rht", q.astype(np.float64), cache.keys[:, kv_head])
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    rows, tokens = q.shape[0], cache.keys.shape[0]
    last = position + np.arange(rows)[:, None]
    seen = np.arange(tokens)[None, :] <= last
    if window:
        seen &= np.arange(tokens)[None, :] > last - window
    scores = np.where(seen[:, None, :], scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("rht,td->rhd", p / p.sum(-1, keepdims=True), cache.values[:, kv_head])


def attend(t, cache, kv_head, position, q, window=0, softcap=0.0):
    """All splits of one item, merged: float32 [rows, heads, dim]."""
    end = position + q.shape[0]
    parts = [
        t.attend(cache.native, kv_head, cache.blocks, b, min(b + SPLIT, end), position, q, window, softcap)
        for b in range(0, end, SPLIT)
    ]
    return np.stack(
        [t.merge(*(np.stack([p[i][r] for p in parts]) for i in range(3))) for r in range(q.shape[0])]
    )


def queries(rows, heads, dim, seed=5):
    q = np.random.default_rng(seed).standard_normal((rows, heads, dim)).astype(np.float32)
    return (q * np.float32(2 / np.sqrt(dim))).astype(np.float32)


def check(t, cache, rows, heads, window=0, softcap=0.0):
    tokens, kv_heads, dim = cache.keys.shape
    q = queries(rows, heads, dim)
    for kv_head in range(kv_heads):
        got = attend(t, cache, kv_head, tokens - rows, q, window, softcap)
        want = reference(cache, kv_head, tokens - rows, q, window, softcap)
        assert cases.relative_rms(got, want) < 2e-6


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("context", [1, 15, 16, 17, 127, 128, 129, 1000])
def test_context_lengths(name, context, block_size):
    t = cases.table(name)
    cache = Cache(t, context, 2, 64, block_size)
    check(t, cache, 1, 3)
    if context > 16:
        check(t, cache, 13, 3)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("heads", [1, 4, 7, 8])
def test_heads_and_sizes(name, heads, dim):
    t = cases.table(name)
    cache = Cache(t, 150, 1, dim, 32)
    check(t, cache, 1, heads)
    check(t, cache, 5, heads)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("window", [1, 2, 16, 40, 128, 700])
def test_windows(name, window):
    t = cases.table(name)
    cache = Cache(t, 650, 1, 64, 16)
    check(t, cache, 1, 3, window=window)
    check(t, cache, 20, 2, window=window)


@pytest.mark.parametrize("name", TABLES)
def test_softcap(name):
    t = cases.table(name)
    cache = Cache(t, 140, 1, 64, 16)
    check(t, cache, 9, 2, softcap=3.0)
    check(t, cache, 9, 2, softcap=50.0)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("window", [0, 33])
def test_rows_and_heads_do_not_see_each_other(name, window):
    t = cases.table(name)
    cache = Cache(t, 600, 1, 80, 16)
    q = queries(19, 5, 80)
    together = attend(t, cache, 0, 581, q, window)
    for row in range(19):
        assert (attend(t, cache, 0, 581 + row, q[row : row + 1], window)[0] == together[row]).all()
    for head in range(5):
        one = np.ascontiguousarray(q[:, head : head + 1])
        assert (attend(t, cache, 0, 581, one, window)[:, 0] == together[:, head]).all()


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("row", range(1, 8))
def test_values_that_a_row_may_not_see_are_never_used(name, row):
    """Later tokens of the same sequence may hold infinity; earlier rows must not notice."""
    t = cases.table(name)
    cache = Cache(t, 40, 1, 64, 16)
    q = queries(8, 2, 64)
    clean = attend(t, cache, 0, 32, q)
    bad = np.full(64, np.inf, np.float32)
    t.store_kv(cache.native, 0, cache.blocks[2], row, bad, bad)
    spoiled = attend(t, cache, 0, 32, q)
    assert (spoiled[:row] == clean[:row]).all()
    assert np.isnan(spoiled[row:]).all()


@pytest.mark.parametrize("name", TABLES)
def test_values_that_left_the_window_are_never_used(name):
    t = cases.table(name)
    cache = Cache(t, 40, 1, 64, 16)
    q = queries(8, 2, 64)
    clean = attend(t, cache, 0, 32, q, window=5)
    bad = np.full(64, np.inf, np.float32)
    t.store_kv(cache.native, 0, cache.blocks[1], 15, bad, bad)  # token 31: seen by the rows at 32 to 35
    spoiled = attend(t, cache, 0, 32, q, window=5)
    assert np.isnan(spoiled[:4]).all()
    assert (spoiled[4:] == clean[4:]).all()


@pytest.mark.parametrize("name", TABLES)
def test_not_a_number_surfaces(name):
    t = cases.table(name)
    cache = Cache(t, 40, 1, 64, 16)
    q = queries(2, 2, 64)
    q[1, 0, 3] = np.nan
    got = attend(t, cache, 0, 38, q)
    assert np.isnan(got[1, 0]).all()
    assert np.isfinite(got[0]).all()
    assert np.isfinite(got[1, 1]).all()


@pytest.mark.parametrize("name", TABLES)
def test_nothing_visible_merges_as_nothing(name):
    """A window may hide a whole split from a row."""
    t = cases.table(name)
    cache = Cache(t, 600, 1, 64, 16)
    q = queries(1, 2, 64)
    out, largest, total = t.attend(cache.native, 0, cache.blocks, 0, 512, 590, q, 16)
    assert np.isneginf(largest).all()
    assert not out.any()
    assert not total.any()
    check(t, cache, 1, 2, window=16)


@pytest.mark.parametrize("name", TABLES)
def test_large_scores_do_not_overflow(name):
    t = cases.table(name)
    cache = Cache(t, 300, 1, 64, 16)
    q = queries(3, 2, 64) * np.float32(400)
    got = attend(t, cache, 0, 297, q)
    assert cases.relative_rms(got, reference(cache, 0, 297, q)) < 1e-3


@pytest.mark.parametrize("name", TABLES)
def test_stored_halves_are_rounded_to_nearest(name):
    t = cases.table(name)
    cache = K.KvCache(1, 1, 16, 16)
    values = np.array(
        [0, -0.0, 1 / 3, 65504, 65519.9, 65520, 1e6, 6e-8, 2.9e-8, 1e-5, np.inf, -7.77, 2049, 2051, 1, 5]
    )
    values = values.astype(np.float32)
    t.store_kv(cache, 0, 0, 3, values, values)
    with np.errstate(over="ignore"):
        want = values.astype(np.float16).view(np.uint16)
    data = cache.data().reshape(2, 16, 16)
    assert (data[0, :, 3] == want).all()
    assert (data[1, 3] == want).all()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    tokens=st.integers(1, 1100),
    rows=st.integers(1, 20),
    heads=st.integers(1, 9),
    dim=st.sampled_from([16, 48, 64, 128]),
    block_size=st.sampled_from([16, 32, 64, 128]),
    window=st.one_of(st.just(0), st.integers(1, 600)),
    softcap=st.sampled_from([0.0, 20.0]),
)
@pytest.mark.parametrize("name", TABLES)
def test_any_item(name, tokens, rows, heads, dim, block_size, window, softcap):
    t = cases.table(name)
    cache = Cache(t, tokens, 1, dim, block_size)
    check(t, cache, min(rows, tokens), heads, window, softcap)
