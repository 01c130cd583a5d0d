"""Inputs and float64 references for the kernel tests; knows the kernels only through their Python view."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from lmdeploy.turbomind import _turbomind

K = _turbomind.kernels
TABLES = K.supported()
KINDS = {
    "w4zero": K.W4_ZERO,
    "w4min": K.W4_MIN,
    "int8": K.INT8,
    "int8min": K.INT8_MIN,
    "bf16": K.BF16,  # with two planes of activations
    "bf16x1": K.BF16,  # with one
    "fp16": K.FP16,
}
DENSE = {"bf16": ml_dtypes.bfloat16, "bf16x1": ml_dtypes.bfloat16, "fp16": np.float16}
NONE16, NONE8 = np.zeros(0, np.uint16), np.zeros(0, np.uint8)


def table(name: str):
    return K.Table.get(name)


@dataclass
class Weights:
    packed: object
    codes: np.ndarray
    values: np.ndarray  # float64 [n, k], exactly what the packed form means


def pack(kind: str, codes, k: int, group: int, scales=None, zeros=None, mins=None, src_group=None, rows=None):
    """Packs [n, k] codes; scales and mins are float16 [n, groups], zeros uint8."""
    n = codes.shape[0]
    packed = K.PackedMatrix(KINDS[kind], n, k, 0 if kind in DENSE else group)
    packed.pack(
        np.ascontiguousarray(codes).view(np.uint8).ravel(),
        NONE16 if scales is None else scales.view(np.uint16).ravel(),
        NONE8 if zeros is None else zeros.ravel(),
        NONE16 if mins is None else mins.view(np.uint16).ravel(),
        k,
        src_group or group,
        0,
        n,
        0,
    )
    return packed


def make_weights(
    kind: str, n: int, k: int, group: int, seed: int = 0, src_group: int | None = None
) -> Weights:
    rng = np.random.default_rng(seed)
    if kind in DENSE:
        codes = (rng.standard_normal((n, k)) * 0.05).astype(DENSE[kind])
        return Weights(
            pack(kind, codes.view(np.uint16), k, 0), codes.view(np.uint16), codes.astype(np.float64)
        )
    groups = -(-k // (src_group or group))
    scales = (rng.uniform(0.5, 2.0, (n, groups)) * 0.01).astype(np.float16)
    zeros = mins = None
    if kind == "int8":
        codes = rng.integers(-128, 128, (n, k)).astype(np.int8)
    elif kind == "int8min":
        codes = rng.integers(0, 256, (n, k)).astype(np.uint8)
    else:
        codes = rng.integers(0, 16, (n, k)).astype(np.uint8)
    if kind == "w4zero":
        zeros = rng.integers(0, 16, (n, groups)).astype(np.uint8)
    if kind in ("w4min", "int8min"):
        middle = 7.5 if kind == "w4min" else 127.5
        mins = (-middle * scales * rng.uniform(0.8, 1.2, scales.shape)).astype(np.float16)
    packed = pack(kind, codes, k, group, scales, zeros, mins, src_group)
    return Weights(packed, codes, dequantize(codes, src_group or group, scales, zeros, mins))


def dequantize(codes, group, scales, zeros=None, mins=None) -> np.ndarray:
    def spread(x):
        return np.repeat(x.astype(np.float64), group, axis=1)[:, : codes.shape[1]]

    values = codes.astype(np.float64)
    if zeros is not None:
        values = values - spread(zeros)
    values = values * spread(scales)
    return values if mins is None else values + spread(mins)


def activations(rows: int, k: int, seed: int = 1) -> np.ndarray:
    """Gaussian rows with a few outlier channels, as hidden states have."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, k)).astype(np.float32)
    x[:, rng.integers(0, k, k // 256)] *= 40
    return x


def prepare(t, x, kind: str, group: int, span: int = 0, threshold: float = 0.0):
    if kind == "fp16":
        return t.prepare(x, 0, int8=False, f32=True, span=span)
    if kind in DENSE:
        return t.prepare(x, 0, int8=False, bf16=1 if kind == "bf16x1" else 2, span=span)
    return t.prepare(x, group, span=span, threshold=threshold)


def run(
    name: str,
    kind: str,
    group: int,
    weights: Weights,
    x: np.ndarray,
    begin: int = 0,
    end: int = -1,
    threshold: float = 0.0,
):
    t = table(name)
    return t.matmul(weights.packed, prepare(t, x, kind, group, threshold=threshold), begin, end)


def relative_rms(got, want) -> float:
    scale = np.sqrt(np.mean(np.square(want)))
    return float(np.sqrt(np.mean(np.square(np.asarray(got, np.float64) - want))) / scale)
