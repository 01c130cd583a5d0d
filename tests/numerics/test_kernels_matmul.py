"""Matrix products of every kernel table against float64 on the same weights."""

from __future__ import annotations

import kernel_cases as cases
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import TABLES, K

QUANTISED = ["w4zero", "w4min", "int8", "int8min"]
SPAN = 128  # inputs of a row that share a scale
BOUND = dict.fromkeys(QUANTISED, 4e-4)
BOUND |= {"bf16": 1e-4, "bf16x1": 3e-3, "fp16": 1e-5}
KIND_GROUPS = [(kind, group) for kind in QUANTISED for group in (32, 64, 128)]
KIND_GROUPS += [(kind, 0) for kind in cases.DENSE]


def check(name, kind, group, n, k, rows):
    weights = cases.make_weights(kind, n, k, group, seed=n + k)
    x = cases.activations(rows, k, seed=rows)
    got = cases.run(name, kind, group, weights, x)
    want = x.astype(np.float64) @ weights.values.T
    assert not got[:, n:].any(), "padding channels must be zero"
    assert cases.relative_rms(got[:, :n], want) < BOUND[kind]
    worst = np.abs(got[:, :n] - want).max() / np.sqrt(np.mean(want**2))
    assert worst < 6 * BOUND[kind]


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(("kind", "group"), KIND_GROUPS)
def test_every_number_of_rows(name, kind, group):
    small = name == "portable"
    for rows in [1, 3, 8, 9] if small else [*range(1, 18), 31, 33, 47, 48, 49, 129]:
        check(name, kind, group, 16 if small else 48, 256 if small else 576, rows)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(("kind", "group"), KIND_GROUPS)
@pytest.mark.parametrize(("n", "k"), [(16, 128), (48, 576), (960, 896), (1000, 128), (16, 8320), (17, 100)])
def test_shapes(name, kind, group, n, k):
    if name == "portable":
        n, k = min(n, 33), min(k, 1100)
    check(name, kind, group, n, k, 1)
    check(name, kind, group, n, k, 5 if name == "portable" else 11)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("kind", QUANTISED)
def test_integers_are_exact(name, kind):
    """Integer activations with largest value 16256, power-of-two scales: every table is exact."""
    rng = np.random.default_rng(3)
    n, k, group, rows = 32, 256, 64, 9
    x = np.zeros((rows, k), np.float32)
    x[:, rng.integers(0, k, 24)] = rng.integers(-900, 900, (rows, 24))
    x[:, ::group] = 16256 * rng.choice([-1, 1], (rows, k // group))
    scales = np.full((n, k // group), 0.25, np.float16)
    codes = rng.integers(0, 16, (n, k)).astype(np.uint8)
    zeros = rng.integers(0, 16, scales.shape).astype(np.uint8) if kind == "w4zero" else None
    mins = rng.integers(-8, 8, scales.shape).astype(np.float16) if kind == "w4min" else None
    if kind == "int8":
        codes = rng.integers(-128, 128, (n, k)).astype(np.int8)
    if kind == "int8min":
        codes = rng.integers(0, 256, (n, k)).astype(np.uint8)
        mins = rng.integers(-8, 8, scales.shape).astype(np.float16)
    packed = cases.pack(kind, codes, k, group, scales, zeros, mins)
    want = x.astype(np.float64) @ cases.dequantize(codes, group, scales, zeros, mins).T
    got = cases.run(name, kind, group, cases.Weights(packed, codes, None), x)
    assert (got == want).all()


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(("kind", "group"), KIND_GROUPS)
def test_a_row_does_not_see_its_neighbours(name, kind, group):
    n, k, rows = 64, 576, 9 if name == "portable" else 64
    weights = cases.make_weights(kind, n, k, group)
    x = cases.activations(rows, k)
    together = cases.run(name, kind, group, weights, x)
    for row in range(rows):
        assert (cases.run(name, kind, group, weights, x[row : row + 1])[0] == together[row]).all()
    for cut in (2, 5, 7):
        assert (cases.run(name, kind, group, weights, x[:cut]) == together[:cut]).all()


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(("kind", "group"), KIND_GROUPS)
def test_a_tile_does_not_see_how_the_matrix_is_cut(name, kind, group):
    weights = cases.make_weights(kind, 112, 384, group)
    for rows in (1, 4, 20):
        x = cases.activations(rows, 384)
        whole = cases.run(name, kind, group, weights, x)
        for begin, end in [(0, 1), (1, 4), (2, 7), (6, 7), (0, 5)]:
            part = cases.run(name, kind, group, weights, x, begin, end)
            assert (part == whole[:, begin * 16 : end * 16]).all()


@pytest.mark.parametrize("kind", QUANTISED)
def test_vector_tables_agree_bit_for_bit(kind):
    """Their integer sums are exact and their float sums have the same order and form."""
    weights = cases.make_weights(kind, 48, 576, 64)
    results = [cases.run(name, kind, 64, weights, cases.activations(9, 576)) for name in TABLES[1:]]
    assert all((result == results[0]).all() for result in results)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(
    ("kind", "code"), [("w4zero", 15), ("w4min", 15), ("int8", -128), ("int8", 127), ("int8min", 255)]
)
def test_largest_sums_do_not_overflow(name, kind, code, group):
    n, k = 16, 256
    codes = np.full((n, k), code, np.int8 if kind == "int8" else np.uint8)
    scales = np.ones((n, k // group), np.float16)
    zeros = np.zeros(scales.shape, np.uint8) if kind == "w4zero" else None
    mins = np.zeros(scales.shape, np.float16) if kind in ("w4min", "int8min") else None
    packed = cases.pack(kind, codes, k, group, scales, zeros, mins)
    for pattern in ([1.0], [-1.0], [1.0, -1.0, -1.0, 1.0], [0.9961, 1, -0.9961, -1]):
        x = np.tile(np.float32(pattern * (k // len(pattern))) * 3, (9, 1))
        want = x.astype(np.float64) @ np.full((k, n), float(code))
        got = cases.run(name, kind, group, cases.Weights(packed, codes, None), x)
        np.testing.assert_allclose(got, want, atol=3e-4 * 3 * abs(code) * np.sqrt(k), rtol=3e-4)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(("kind", "group"), KIND_GROUPS)
def test_zero_rows_and_values_that_are_not_numbers(name, kind, group):
    weights = cases.make_weights(kind, 32, 256, group)
    x = cases.activations(6, 256)
    x[1] = 0
    x[3, 100] = np.nan
    x[4, 7] = np.inf
    got = cases.run(name, kind, group, weights, x)
    assert not got[1].any()
    assert np.isnan(got[3]).all()
    assert not np.isfinite(got[4]).any()
    clean = cases.run(name, kind, group, weights, x[[0, 2, 5]])
    assert (got[[0, 2, 5]] == clean).all()


@pytest.mark.parametrize("name", TABLES)
def test_zero_scales_give_zero(name):
    codes = np.full((16, 64), 9, np.uint8)
    scales = np.zeros((16, 2), np.float16)
    packed = cases.pack("w4zero", codes, 64, 32, scales, np.full((16, 2), 3, np.uint8))
    assert not cases.run(
        name, "w4zero", 32, cases.Weights(packed, codes, None), cases.activations(3, 64)
    ).any()


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("group", [16, 32, 64, 128])
def test_planes_of_prepared_rows(name, group):
    t = cases.table(name)
    rows, k = 11, 352
    x = cases.activations(rows, k) * np.float32(3)
    x[2, :group] = 0
    rows_in_blocks = [8, 3]
    padded = -(-k // group) * group
    prepared = t.prepare(x, group, bf16=2)

    def unblock(plane, per):
        parts, at = [], 0
        for m in rows_in_blocks:
            part = plane[at : at + m * padded].reshape(padded // per, m, per)
            parts.append(part.transpose(1, 0, 2).reshape(m, padded))
            at += m * padded
        return np.concatenate(parts)

    whole = 128 * unblock(prepared.hi, 4).astype(np.int32) + unblock(prepared.lo, 4)
    scale = prepared.scale.reshape(rows, -1)
    padded_x = np.pad(x, ((0, 0), (0, padded - k))).astype(np.float64)
    groups = padded // group
    span = np.arange(groups) * group // SPAN
    largest = np.abs(padded_x).reshape(rows, groups, group).max(-1)
    largest = np.stack([largest[:, span == s].max(1) for s in span], 1)
    np.testing.assert_allclose(scale, largest / 127, rtol=1e-6)
    scale = scale / np.float32(128)
    assert np.abs(whole).max() == 16256
    error = np.abs(whole * np.repeat(scale, group, 1) - padded_x) - 0.5001 * np.repeat(scale, group, 1)
    assert (error <= 1e-6 * np.abs(padded_x)).all()
    sums = whole.reshape(rows, -1, group).sum(-1)
    assert (prepared.sum.reshape(rows, -1) == sums / 128).all()
    floats = [
        (unblock(p, 2).astype(np.uint32) << 16).view(np.float32) for p in (prepared.bf_hi, prepared.bf_lo)
    ]
    np.testing.assert_allclose(floats[0].astype(np.float64) + floats[1], padded_x, rtol=2.0**-16)
    for span in (SPAN, 2 * SPAN):
        pieces = t.prepare(x, group, bf16=2, span=span)
        for plane in ("hi", "lo", "scale", "sum", "bf_hi", "bf_lo"):
            assert (getattr(pieces, plane) == getattr(prepared, plane)).all()


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(("kind", "group"), KIND_GROUPS)
def test_gathered_rows_are_the_weights(name, kind, group):
    weights = cases.make_weights(kind, 40, 200, group)
    t = cases.table(name)
    for row in (0, 15, 16, 39):
        np.testing.assert_allclose(
            t.gather_row(weights.packed, row), weights.values[row], rtol=3e-7, atol=1e-8
        )


@pytest.mark.parametrize(("kind", "group"), KIND_GROUPS)
def test_packing_round_trip(kind, group):
    weights = cases.make_weights(kind, 37, 200, group)
    for channel in range(37):
        code = weights.packed.codes(channel)
        assert (code == weights.codes[channel].view(np.uint8)).all()
    assert weights.packed.nbytes == K.packed_bytes(cases.KINDS[kind], 37, 200, group)


def test_finer_groups_change_no_weight():
    coarse = cases.make_weights("w4zero", 20, 256, 32, src_group=128)
    got = np.stack([cases.table("portable").gather_row(coarse.packed, row) for row in range(20)])
    assert (got == coarse.values.astype(np.float32)).all()


def test_rows_of_several_sources_share_tiles():
    """Query, key and value packed one after another, at offsets that are not multiples of a tile."""
    parts = [cases.make_weights("int8", n, 96, 32, seed=n) for n in (20, 9, 30)]
    packed = K.PackedMatrix(K.INT8, 59, 96, 32)
    at = 0
    rng_scales = [np.random.default_rng(n).uniform(0.5, 2.0, (n, 3)) * 0.01 for n in (20, 9, 30)]
    for part, scales in zip(parts, rng_scales, strict=True):
        n = part.codes.shape[0]
        half = scales.astype(np.float16).view(np.uint16).ravel()
        packed.pack(part.codes.view(np.uint8).ravel(), half, cases.NONE8, cases.NONE16, 96, 32, 0, n, at)
        at += n
    got = np.stack([cases.table("portable").gather_row(packed, row) for row in range(59)])
    np.testing.assert_allclose(got, np.concatenate([p.values for p in parts]), rtol=3e-7)


@pytest.mark.parametrize(("group", "k"), [(0, 64), (8, 64), (48, 64), (256, 256), (16, 80)])
def test_unknown_groups_are_refused(group, k):
    with pytest.raises(ValueError, match="use 32, 64, 128, or 16 with a multiple of 32 columns"):
        K.packed_bytes(K.INT8, 16, k, group)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("kind", QUANTISED)
def test_groups_of_sixteen(name, kind):
    """Over whole pairs of groups: any number of rows, any cut, each row by itself."""
    for rows in (1, 2, 5, 8, 11):
        for n, k in ((17, 32), (48, 352), (33, 1024)):
            check(name, kind, 16, n, k, rows)
    weights = cases.make_weights(kind, 48, 352, 16)
    x = cases.activations(9, 352)
    together = cases.run(name, kind, 16, weights, x)
    for row in range(9):
        assert (cases.run(name, kind, 16, weights, x[row : row + 1])[0] == together[row]).all()
    assert (cases.run(name, kind, 16, weights, x, 1, 3) == together[:, 16:48]).all()
    for row in (0, 47):
        gathered = cases.table(name).gather_row(weights.packed, row)
        np.testing.assert_allclose(gathered, weights.values[row], rtol=3e-7, atol=1e-8)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(1, 100), st.integers(2, 700), st.integers(1, 40), st.sampled_from(KIND_GROUPS))
@pytest.mark.parametrize("name", TABLES)
def test_any_shape(name, n, k, rows, kind_group):
    kind, group = kind_group
    weights = cases.make_weights(kind, n, k, group, seed=n)
    x = cases.activations(rows, k, seed=k)
    got = cases.run(name, kind, group, weights, x)
    # Few inputs can cancel by chance: the error is measured against what they could sum to, and where one
    # input sets the steps of its span, against half a step of each.
    scale = np.sqrt(np.square(x.astype(np.float64)) @ np.square(weights.values.T))
    error = np.abs(got[:, :n] - x.astype(np.float64) @ weights.values.T)
    half_steps = np.zeros_like(error)
    for i in range(0, k, SPAN) if group else ():
        step = np.abs(x[:, i : i + SPAN]).max(1).astype(np.float64) / 16256
        half_steps += 0.5 * np.outer(step, np.abs(weights.values[:, i : i + SPAN]).sum(1))
    assert (error <= 1e-6 + max(3e-3, 5 * BOUND[kind]) * scale + half_steps).all()
    if error.size >= 500:
        assert np.sqrt(np.mean(error**2)) <= 1e-6 + max(3e-4, BOUND[kind]) * np.sqrt(np.mean(scale**2))
