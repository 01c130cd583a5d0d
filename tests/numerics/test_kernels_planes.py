"""One and two activation planes: which spans get the second, what it buys, no row sees its neighbours."""

from __future__ import annotations

import kernel_cases as cases
import numpy as np
import pytest
from kernel_cases import TABLES

NEVER = float("inf")
THRESHOLDS = {"exact": 0.0, "auto": 4.0, "fast": NEVER}
QUANTISED = [(kind, group) for kind in ("w4zero", "w4min", "int8", "int8min") for group in (32, 128)]


SPAN = 128  # inputs that share a scale


def rounded(x: np.ndarray, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """float64 values of the planes by the rule in table.h, and which spans have two."""
    spans = x.astype(np.float64).reshape(len(x), -1, SPAN)
    top, rms = np.abs(spans).max(-1), np.sqrt(np.mean(spans**2, axis=-1))
    second = top > threshold * rms
    steps = np.where(second, 16256, 127)[..., None]
    scale = top[..., None] / steps
    return (np.rint(spans / scale) * scale).reshape(x.shape), second


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("threshold", THRESHOLDS.values())
def test_planes_follow_the_rule(name, threshold):
    rows, k, group = 11, 512, 64
    x = cases.activations(rows, k)
    a = cases.table(name).prepare(x, group, threshold=threshold)
    _, second = rounded(x, threshold)
    if threshold == NEVER:
        assert len(a.lo) == 0 and not second.any()
        return
    assert (a.second.reshape(rows, -1) == np.repeat(second, SPAN // group, 1)).all()
    assert threshold == 0 or 0 < second.sum() < second.size


@pytest.mark.parametrize("name", [name for name in TABLES if name != "portable"])
@pytest.mark.parametrize("group", [16, 32, 128])
@pytest.mark.parametrize("threshold", THRESHOLDS.values())
def test_planes_are_those_of_the_portable_kernels(name, group, threshold):
    x = cases.activations(19, 1024, seed=group)
    ours, plain = (cases.table(table).prepare(x, group, threshold=threshold) for table in (name, "portable"))
    for plane in ("hi", "lo", "second"):
        assert np.array_equal(getattr(ours, plane), getattr(plain, plane)), plane


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(("kind", "group"), QUANTISED)
@pytest.mark.parametrize("threshold", THRESHOLDS.values())
def test_products_of_the_planes(name, kind, group, threshold):
    """Against float64 on the rounded activations: the product itself adds nothing."""
    n, k = 48, 512
    weights = cases.make_weights(kind, n, k, group)
    for rows in [1, 3, 9] if name == "portable" else [*range(1, 18), 33, 49, 129]:
        x = cases.activations(rows, k, seed=rows)
        got = cases.run(name, kind, group, weights, x, threshold=threshold)
        want = rounded(x, threshold)[0] @ weights.values.T
        # A value that lies between two whole numbers may go either way.
        assert cases.relative_rms(got, want) < 3e-4


@pytest.mark.parametrize("name", TABLES)
def test_what_a_plane_costs(name):
    """One plane does for values of one size; outliers need the second."""
    n, k, group = 64, 1024, 128
    weights = cases.make_weights("w4zero", n, k, group)
    x = np.random.default_rng(5).standard_normal((8, k)).astype(np.float32)
    outliers = x.copy()
    outliers[:, ::256] *= 50

    def error(values: np.ndarray, threshold: float) -> float:
        got = cases.run(name, "w4zero", group, weights, values, threshold=threshold)
        return cases.relative_rms(got, values.astype(np.float64) @ weights.values.T)

    assert 1e-3 < error(x, NEVER) < 1e-2
    assert 1e-2 < error(outliers, NEVER) < 6e-2
    assert error(outliers, 5.5) < 3e-3
    assert error(outliers, 0.0) < 3e-4


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(("kind", "group"), [*QUANTISED, ("w4zero", 64), ("w4min", 16)])
@pytest.mark.parametrize("threshold", THRESHOLDS.values())
def test_every_number_of_rows_gives_the_same_bits(name, kind, group, threshold):
    n, k, most = 80, 352, 12 if name == "portable" else 133
    weights = cases.make_weights(kind, n, k, group)
    x = cases.activations(most, k)
    together = cases.run(name, kind, group, weights, x, threshold=threshold)
    for rows in range(1, most, 1 if most < 20 else 3):
        some = cases.run(name, kind, group, weights, x[-rows:], threshold=threshold)
        assert (some == together[-rows:]).all()
    for begin, end in ((0, 1), (1, 4), (2, 5)):
        part = cases.run(name, kind, group, weights, x, begin, end, threshold=threshold)
        assert (part == together[:, 16 * begin : 16 * end]).all()


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("threshold", THRESHOLDS.values())
def test_numbers_that_are_none_surface(name, threshold):
    weights = cases.make_weights("w4zero", 16, 128, 32)
    x = cases.activations(4, 128)
    x[1, 7], x[2, 100] = np.nan, np.inf
    got = cases.run(name, "w4zero", 32, weights, x, threshold=threshold)
    assert np.isnan(got[1:3]).all() and np.isfinite(got[[0, 3]]).all()
