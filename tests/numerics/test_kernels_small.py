"""Norms, rotations, activations, sampling helpers and the choice of the table."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import kernel_cases as cases
import numpy as np
import pytest
from kernel_cases import TABLES, K

LENGTHS = [1, 7, 15, 16, 17, 64, 100, 576, 1537]


def vector(n, seed=0, spread=3.0):
    return (np.random.default_rng(seed).standard_normal(n) * spread).astype(np.float32)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(name, n, offset):
    x, weight = vector(n), vector(n, 1)
    wide = x.astype(np.float64)
    want = wide / np.sqrt(np.mean(wide**2) + 1e-5) * (offset + weight.astype(np.float64))
    np.testing.assert_allclose(
        cases.table(name).rms_norm(x, weight, offset, 1e-5), want, rtol=2e-6, atol=1e-7
    )


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("value", [3e19, np.inf, np.nan])
def test_rms_norm_hides_no_overflow(name, value):
    """A sum of squares beyond float32 is no number; dividing by infinity would give zeros."""
    x = vector(100)
    x[37] = value
    assert np.isnan(cases.table(name).rms_norm(x, vector(100, 1), 0.0, 1e-5)).all()


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (128, 128), (80, 32), (96, 40), (256, 256), (64, 6)])
def test_rope(name, dim, rotary):
    head, angle = vector(dim), vector(rotary // 2, 2, 10)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    wide, half = head.astype(np.float64), rotary // 2
    want = wide.copy()
    want[:half] = wide[:half] * cos - wide[half:rotary] * sin
    want[half:rotary] = wide[half:rotary] * cos + wide[:half] * sin
    np.testing.assert_allclose(cases.table(name).rope(head, cos, sin, rotary), want, rtol=1e-5, atol=1e-6)


def gelu(x):
    return 0.5 * x * (1 + np.array([math.erf(v / math.sqrt(2)) for v in x]))


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x):
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x))


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize(("kind", "form"), [("silu", silu), ("gelu_tanh", gelu_tanh), ("gelu", gelu)])
def test_activations(name, n, kind, form):
    gate, up = vector(n, 3, 4.0), vector(n, 4)
    gate[:: max(1, n // 5)] *= 30
    want = form(gate.astype(np.float64)) * up
    got = cases.table(name).activation(kind, gate, up)
    np.testing.assert_allclose(got, want, rtol=3e-6, atol=2e-6)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "gelu"])
def test_activations_at_the_ends(name, kind):
    gate = np.array([-1e30, -1000, -88, 0, 88, 1000, 1e30, np.nan], np.float32)
    got = cases.table(name).activation(kind, gate, np.ones(8, np.float32))
    np.testing.assert_allclose(got[:7], [0, 0, 0, 0, 88, 1000, 1e30], atol=1e-30)
    assert np.isnan(got[7])


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("n", LENGTHS)
def test_add_scaled(name, n):
    x, y = vector(n), vector(n, 1)
    want = x.astype(np.float64) + 0.3 * y.astype(np.float64)
    np.testing.assert_allclose(cases.table(name).add_scaled(x, y, 0.3), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("n", [*LENGTHS, 49152])
def test_max_is_the_first_largest(name, n):
    t = cases.table(name)
    x = vector(n)
    assert t.max(x) == (x.max(), int(x.argmax()))
    x[n // 3], x[n // 2], x[n - 1] = 99, 99, 99
    assert t.max(x) == (99, n // 3)
    x[:] = -np.inf
    assert t.max(x) == (-np.inf, 0)
    x[n - 1] = np.nan
    assert math.isnan(t.max(x)[0])


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("n", [*LENGTHS, 49152])
def test_sum_exp(name, n):
    x = vector(n, 0, 5.0)
    x[n // 2] = -np.inf if n > 1 else x[n // 2]
    for scale in (1.0, 0.7, 3.0):
        largest = x.max()
        want = np.exp((x.astype(np.float64) - largest) * scale)
        total, each = cases.table(name).sum_exp(x, largest, scale)
        assert total == pytest.approx(want.sum(), rel=3e-6)
        np.testing.assert_allclose(each, want, rtol=3e-5, atol=1e-37)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("n", [*LENGTHS, 5000])
def test_collect(name, n):
    x = vector(n)
    want = np.flatnonzero(x >= 1.5)
    for limit in (n, max(1, len(want) // 2), 1):
        index, count = cases.table(name).collect(x, 1.5, limit)
        assert count == len(want)
        assert (index == want[:limit]).all()
    x[0] = np.nan
    assert 0 not in cases.table(name).collect(x, -99.0, n)[0]


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("n", [*LENGTHS, 5000])
def test_block_max(name, n):
    x = vector(n) - np.float32(50)
    x[n // 2] = -np.inf
    for size in (16, 64):
        got = cases.table(name).block_max(x, size)
        assert got.tolist() == [x[i : i + size].max() for i in range(0, n, size)]


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("n", [*LENGTHS, 5000])
@pytest.mark.parametrize(("scale", "cap"), [(1.0, 0.0), (0.125, 0.0), (1.0, 30.0), (3.0, 50.0)])
def test_finish_logits(name, n, scale, cap):
    t, x = cases.table(name), vector(n, 0, 40.0)
    want = x.astype(np.float64) * scale
    want = cap * np.tanh(want / cap) if cap else want
    got, finite = t.finish_logits(x, scale, cap)
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6 * max(cap, 1))
    assert finite
    for bad in (np.nan, np.inf, -np.inf):  # a cap must not hide them
        damaged = x.copy()
        damaged[n - 1] = bad
        assert not t.finish_logits(damaged, scale, cap)[1]


def import_with(kernels):
    code = "from lmdeploy.turbomind._turbomind import kernels as k; print(k.active())"
    env = {**os.environ, "LMDEPLOY_KERNELS": kernels}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)


def test_the_fastest_table_is_the_default():
    assert import_with("").stdout.strip() == TABLES[-1]


@pytest.mark.parametrize("name", TABLES)
def test_a_table_can_be_chosen(name):
    assert import_with(name).stdout.strip() == name


def test_an_unknown_table_is_refused_by_name():
    result = import_with("sse9")
    assert result.returncode != 0
    assert "sse9" in result.stderr
    assert ", ".join(TABLES) in result.stderr


def test_detected_features_fit_the_tables():
    features = K.detect()
    assert ("avx2" in TABLES) <= ({"avx2", "fma", "f16c"} <= set(features))
    assert ("avx512" in TABLES) <= ({"avx512f", "avx512_vnni", "avx512_bf16"} <= set(features))
