"""Attention over the paged cache of every kernel table against float64 on the values the cache holds."""

from __future__ import annotations

import kernel_cases as cases
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import TABLES, K

SPLIT = 512
BITS = (16, 8, 4)
# Relative error of an output that rounding queries and weights may make; and with that of keys and values.
ARITHMETIC = {16: 6e-4, 8: 4e-4, 4: 4e-4}
WITH_CACHE = {16: 4e-4, 8: 2e-2, 4: 0.3}


def from_bf16(halves):
    return (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def hadamard(size):
    """The orthogonal matrix, by Sylvester's rule."""
    h = np.ones((1, 1))
    while h.shape[0] < size:
        h = np.block([[h, h], [h, -h]])
    return h / np.sqrt(size)


def rotation(dim):
    """[dim, dim]: Hadamard blocks times the signs of the inner-product bent function of six bits."""
    size = dim & -dim
    signs = [(-1) ** bin((d >> 3) & d & 7).count("1") for d in range(dim)]
    return np.kron(np.eye(dim // size), hadamard(size)) * signs


class Cache:
    """A filled cache; keys and values float64 [tokens, kv heads, dim] as given and as it holds them."""

    def __init__(self, t, tokens, kv_heads, dim, block_size, seed=0, bits=16, strong=()):
        rng = np.random.default_rng(seed)
        used = -(-tokens // block_size)
        self.bits, self.block_size = bits, block_size
        self.native = K.KvCache(used + 2, kv_heads, block_size, dim, bits)
        self.native.fill(0xFF)  # NaN scales
        self.blocks = rng.permutation(used + 2)[:used].astype(np.int32)
        self.keys = rng.standard_normal((tokens, kv_heads, dim)).astype(np.float32)
        self.values = rng.standard_normal((tokens, kv_heads, dim)).astype(np.float32)
        for channel, size in strong:
            self.keys[:, :, channel] += np.float32(size)
        for token in range(tokens):
            block, slot = self.blocks[token // block_size], token % block_size
            for head in range(kv_heads):
                t.store_kv(self.native, head, block, slot, self.keys[token, head], self.values[token, head])
        self.given_keys, self.given_values = self.keys.astype(np.float64), self.values.astype(np.float64)
        self.keys, self.values = self.held(tokens, kv_heads, dim)

    def held(self, tokens, kv_heads, dim):
        """Decoded from the bytes, by the layout of table.h."""
        size, bits = self.block_size, self.bits
        runs = -(-dim // 32) * 2 if bits == 4 else dim // 16
        key_bytes, value_bytes = size * dim * bits // 8, size * runs * 16 * bits // 8
        data = self.native.data().reshape(self.native.nbytes // self.head_bytes(dim, runs), -1)
        data = data.reshape(-1, kv_heads, data.shape[1])[self.blocks]
        code = np.dtype("<i2") if bits == 16 else np.dtype("u1")
        keys = np.ascontiguousarray(data[..., :key_bytes]).view(code)
        values = np.ascontiguousarray(data[..., key_bytes : key_bytes + value_bytes]).view(code)
        factors = np.ascontiguousarray(data[..., key_bytes + value_bytes :]).view(np.uint16)
        factors = from_bf16(factors).reshape(len(data), kv_heads, -1, size)
        tiles, heads = size // 16, (len(data), kv_heads)
        if bits == 4:  # [tile][pair of lines][token][2] and [tile][pair of runs][token pair][dimension][2]
            keys = np.stack([keys & 15, keys >> 4], -1).reshape(*heads, tiles, dim // 4, 16, 2, 2)
            keys = keys.transpose(0, 1, 2, 4, 3, 6, 5)
            values = np.stack([values & 15, values >> 4], -1).reshape(*heads, tiles, runs // 2, 8, 16, 2, 2)
            values = values.transpose(0, 1, 2, 4, 6, 3, 7, 5)
        else:  # [tile][line][token][2] and [tile][run][token pair][dimension][2]
            keys = keys.reshape(*heads, tiles, dim // 2, 16, 2).transpose(0, 1, 2, 4, 3, 5)
            values = values.reshape(*heads, tiles, runs, 8, 16, 2).transpose(0, 1, 2, 4, 6, 3, 5)
        keys = keys.reshape(*heads, size, dim).astype(np.float64)
        values = values.reshape(*heads, size, runs * 16)[..., :dim].astype(np.float64)
        keys, values = keys * factors[:, :, 0, :, None], values * factors[:, :, 1, :, None]
        if bits < 16:
            keys, values = keys + factors[:, :, 2, :, None], values + factors[:, :, 3, :, None]
        shape = (len(data) * size, kv_heads, dim)
        back = rotation(dim)
        return tuple(
            (x.transpose(0, 2, 1, 3).reshape(shape)[:tokens] @ back).astype(np.float64)
            for x in (keys, values)
        )

    def head_bytes(self, dim, runs):
        return self.block_size * (dim + runs * 16) * self.bits // 8 + self.block_size * (
            4 if self.bits == 16 else 8
        )


def reference(cache, kv_head, position, q, window=0, softcap=0.0, given=False):
    """float64 [rows, heads, dim], from what the cache holds or from what was given to it."""
    keys, values = (cache.given_keys, cache.given_values) if given else (cache.keys, cache.values)
    scores = np.einsum("rhd,td->rht", q.astype(np.float64), keys[:, kv_head])
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    rows, tokens = q.shape[0], keys.shape[0]
    last = position + np.arange(rows)[:, None]
    seen = np.arange(tokens)[None, :] <= last
    if window:
        seen &= np.arange(tokens)[None, :] > last - window
    scores = np.where(seen[:, None, :], scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("rht,td->rhd", p / p.sum(-1, keepdims=True), values[:, kv_head])


def attend(t, cache, kv_head, position, q, window=0, softcap=0.0):
    """All splits of one item, merged: float32 [rows, heads, dim]."""
    end, turned = position + q.shape[0], t.rotate(q)
    parts = [
        t.attend(
            cache.native, kv_head, cache.blocks, b, min(b + SPLIT, end), position, turned, window, softcap
        )
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
        assert cases.relative_rms(got, want) < ARITHMETIC[cache.bits]
        given = reference(cache, kv_head, tokens - rows, q, window, softcap, given=True)
        assert cases.relative_rms(got, given) < WITH_CACHE[cache.bits]


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("context", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000])
@pytest.mark.parametrize("bits", BITS)
def test_context_lengths(name, bits, context, block_size):
    t = cases.table(name)
    cache = Cache(t, context, 2, 64, block_size, bits=bits)
    check(t, cache, 1, 3)
    if context > 16:
        check(t, cache, 13, 3)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("heads", [1, 4, 7, 8])
@pytest.mark.parametrize("bits", BITS)
def test_heads_and_sizes(name, bits, heads, dim):
    t = cases.table(name)
    cache = Cache(t, 150, 1, dim, 32, bits=bits)
    check(t, cache, 1, heads)
    check(t, cache, 5, heads)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("window", [1, 2, 16, 40, 128, 700])
@pytest.mark.parametrize("bits", BITS)
def test_windows(name, bits, window):
    t = cases.table(name)
    cache = Cache(t, 650, 1, 64, 16, bits=bits)
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
@pytest.mark.parametrize("bits", BITS)
def test_rows_and_heads_do_not_see_each_other(name, bits, window):
    t = cases.table(name)
    cache = Cache(t, 600, 1, 80, 16, bits=bits)
    q = queries(19, 5, 80)
    together = attend(t, cache, 0, 581, q, window)
    for row in range(19):
        assert (attend(t, cache, 0, 581 + row, q[row : row + 1], window)[0] == together[row]).all()
    for head in range(5):
        one = np.ascontiguousarray(q[:, head : head + 1])
        assert (attend(t, cache, 0, 581, one, window)[:, 0] == together[:, head]).all()


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("row", range(1, 8))
@pytest.mark.parametrize("bits", BITS)
def test_values_that_a_row_may_not_see_are_never_used(name, bits, row):
    """Later tokens of the same sequence may hold infinity; earlier rows must not notice."""
    t = cases.table(name)
    cache = Cache(t, 40, 1, 64, 16, bits=bits)
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
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_what_is_stored_is_within_half_a_step(name, bits, dim):
    t = cases.table(name)
    cache = Cache(t, 70, 2, dim, 32, bits=bits, strong=[(3, 50)])
    for wanted, held in ((cache.given_keys, cache.keys), (cache.given_values, cache.values)):
        turned = wanted @ rotation(dim).T
        reach = np.abs(turned).max(-1) / 16383 if bits == 16 else np.ptp(turned, axis=-1) / (2**bits - 1)
        error = np.abs((wanted - held) @ rotation(dim).T).max(-1)
        # Scale and offset are bfloat16, rounded outwards: within 2^-7 of the reach and of the size.
        most = (0.5 + 2**-7) * reach + (0 if bits == 16 else 2**-7 * np.abs(turned).max(-1) / (2**bits - 1))
        assert (error <= 1.01 * most).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [16, 80, 128])
def test_every_table_stores_the_same_bytes(bits, dim):
    caches = [Cache(cases.table(name), 40, 2, dim, 32, bits=bits).native.data() for name in TABLES]
    for other in caches[1:]:
        assert (other != caches[0]).mean() < 2e-3  # a code at a tie may fall to either side


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])
def test_rotation(name, dim):
    t = cases.table(name)
    x = queries(3, 2, dim)
    assert cases.relative_rms(t.rotate(x), x @ rotation(dim).T) < 1e-6
    one = t.merge(t.rotate(x[:, :1]), np.zeros((3, 1), np.float32), np.ones((3, 1), np.float32))
    assert cases.relative_rms(one[0], x[:, 0].mean(0)) < 1e-5


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("value", [0.0, 1e-25, 1e30, 3.0])
@pytest.mark.parametrize("bits", BITS)
def test_equal_values_and_sizes_at_the_edge(name, bits, value):
    t = cases.table(name)
    cache = Cache(t, 20, 1, 64, 16, bits=bits)
    same = np.full(64, value, np.float32)
    for token in range(20):
        t.store_kv(cache.native, 0, cache.blocks[token // 16], token % 16, same, same)
    got = attend(t, cache, 0, 19, queries(1, 2, 64) / np.float32(max(value, 1)))
    np.testing.assert_allclose(got, np.broadcast_to(same, got.shape), rtol={16: 1e-3, 8: 2e-2, 4: 0.3}[bits])


# Output errors with one strong channel in all keys, and what rounding each head where it stands would give.
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(("bits", "bound"), [(16, 6e-4), (8, 4e-2), (4, 0.7)])
def test_a_strong_channel(name, bits, bound):
    t = cases.table(name)
    cache = Cache(t, 300, 1, 64, 32, bits=bits, strong=[(5, 50)])
    q = queries(8, 4, 64)
    assert cases.relative_rms(attend(t, cache, 0, 292, q), reference(cache, 0, 292, q, given=True)) < bound


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    tokens=st.integers(1, 1100),
    rows=st.integers(1, 20),
    heads=st.integers(1, 9),
    dim=st.sampled_from([16, 48, 64, 128]),
    block_size=st.sampled_from([16, 32, 64, 128]),
    window=st.one_of(st.just(0), st.integers(1, 600)),
    softcap=st.sampled_from([0.0, 20.0]),
    bits=st.sampled_from(BITS),
)
@pytest.mark.parametrize("name", TABLES)
def test_any_item(name, tokens, rows, heads, dim, block_size, window, softcap, bits):
    t = cases.table(name)
    cache = Cache(t, tokens, 1, dim, block_size, bits=bits)
    check(t, cache, min(rows, tokens), heads, window, softcap)
