"""Speed of packing: bytes of the file read a second and core, for every kind of source.

    python benchmarks/pack_weights.py                 a matrix of each kind, made up on the spot
    python benchmarks/pack_weights.py MODEL ...       all weights of a model, opening and reading included

One thread; the least of many repetitions. Matrices are small enough for the second-level cache, so that their
figure is the work alone. A model's figure is in CPU time and includes opening and the memory's first touch;
beside it stands the limit of the same run, its files merely read into a buffer, and the ratio to it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from measure.arguments import described, model_path, positive

from lmdeploy.cli.smoke import write_model
from lmdeploy.engine.executor import Limits
from lmdeploy.models.registry import open_checkpoint
from lmdeploy.quant.tensors import StoredMatrix
from lmdeploy.turbomind.convert import pack
from lmdeploy.turbomind.executor import NativeConfig, native_limits, native_shape
from lmdeploy.turbomind.layout import model_layout
from lmdeploy.turbomind.weights import FORMS

N, K = 128, 4096
GROUP = 128
_BLOCKS = {"Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34)}
_BLOCKS |= {"Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210)}
_FLOAT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def matrix(form: str) -> StoredMatrix:
    """Bytes 0 .. 127: no float made of them is infinite."""
    random = np.random.default_rng(0)

    def some(*shape: int, kind: Any = np.uint8) -> Any:
        return random.integers(0, 60, shape).astype(np.uint8).view(kind)

    if form in _BLOCKS:
        values, size = _BLOCKS[form]
        return StoredMatrix(form, some(N, K // values * size), (N, K), 16 if form == "Q6_K" else 32)
    if form in _FLOAT_BYTES:
        return StoredMatrix(form, some(N, K * _FLOAT_BYTES[form]), (N, K), 0)
    scales, zeros = np.ones((N, K // GROUP), np.float16), np.full((N, K // GROUP), 8, np.uint8)
    with_zeros = {"zeros": zeros} if form in ("words4", "awq", "gptq4") else {}
    shape = {
        "words4": (N, K // 2),
        "words8": (N, K),
        "int8": (N, K),
        "awq": (K, N // 2),
        "gptq4": (K // 8, N * 4),
        "gptq8": (K // 4, N * 4),
    }[form]
    data = some(*shape, kind=np.int32 if form in ("awq", "gptq4", "gptq8") else np.uint8)
    return StoredMatrix(form, data, (N, K), GROUP, scales=scales, **with_zeros)


def best(repeats: int, clock: Callable[[], float], work: Callable[[], object]) -> float:
    """Seconds."""
    seconds = []
    for _ in range(repeats):
        begin = clock()
        work()
        seconds.append(clock() - begin)
    return min(seconds)


def empty_model(nbytes: int) -> Any:
    """A native model with one thread and room for `nbytes` of weights."""
    from lmdeploy.turbomind import _turbomind as native

    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name))
        checkpoint = open_checkpoint(name)
        layout = model_layout(checkpoint.spec, {x: checkpoint.info(x) for x in checkpoint.names()})
    limits = Limits(max_rows=1, max_step_tokens=1, max_context=16, block_size=16, num_threads=1)
    shape = native_shape(checkpoint.spec, layout)
    return native.Model(shape, native_limits(NativeConfig(limits, 1)), [-1], nbytes)


def measure_matrix(form: str, repeats: int) -> None:
    stored = matrix(form)
    number, kind = FORMS[form]
    model = empty_model(3 * N * K)
    place = model.add_matrix(kind, N, K, stored.group_size)
    scales = None if stored.scales is None else stored.scales.view(np.uint16).reshape(-1)
    zeros = None if stored.zeros is None else stored.zeros.reshape(-1)

    def run() -> None:
        model.pack_file(place, number, K, stored.group_size, stored.data, None, scales, zeros, 0, 0)

    speed = stored.data.nbytes / best(200 * repeats, time.perf_counter, run) / 1e9
    print(f"{form:<10} {speed:6.2f} GB/s")


def measure_model(path: Path, repeats: int) -> None:
    checkpoint = open_checkpoint(path)
    layout = model_layout(checkpoint.spec, {name: checkpoint.info(name) for name in checkpoint.names()})
    nbytes = sum(checkpoint.info(name).file_bytes for name in checkpoint.names())
    files = [file for file in checkpoint.files if file.suffix in (".gguf", ".safetensors")]

    def read() -> None:
        for file in files:
            with file.open("rb", buffering=0) as opened:
                while opened.readinto(buffer):
                    pass

    buffer = bytearray(4 << 20)

    packing = best(repeats, time.process_time, lambda: pack(checkpoint, layout, 1))
    speed, limit = nbytes / packing / 1e9, nbytes / best(repeats, time.process_time, read) / 1e9
    ratio = f"limit {limit:.2f}, ratio {speed / limit:.2f}"
    print(f"{path.name:<16} {nbytes / 2**20:7.0f} MiB {speed:6.2f} GB/s, {ratio}")


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("model", type=model_path, nargs="*")
    parser.add_argument("--repeats", type=positive, default=5)
    args = parser.parse_args()
    for path in args.model:
        measure_model(path, args.repeats)
    for form in () if args.model else FORMS:
        measure_matrix(form, args.repeats)


if __name__ == "__main__":
    main()
