"""Our engine in this process.  usage: lmdeploy_worker.py MODEL THREADS VARIANT

The variant is an accuracy; any other word leaves that at its default.

Beside its speed it tells what the machine could do right then: each answer holds the read bandwidth and the
dot-product peaks measured just before and after, and the bytes and products the work cannot do without.
"""

from __future__ import annotations

import sys
from typing import Any

from protocol import Measure, Prompts, Tick, serve, timed

READ_BYTES, LIMIT_REPEATS = 256 << 20, 3
SESSION, ROWS, CACHE_SHARE = 2304, 32, 0.04


def load() -> tuple[Measure, dict[str, Any]]:
    import numpy as np
    from measure.rows import ACCURACIES

    from lmdeploy import TurbomindEngineConfig, __version__
    from lmdeploy.engine.request import Request
    from lmdeploy.models.registry import open_checkpoint
    from lmdeploy.runtime.build import build_engine
    from lmdeploy.runtime.resolve import resolve
    from lmdeploy.turbomind import _turbomind

    path, threads, variant = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    options: dict[str, Any] = {"accuracy": variant} if variant in ACCURACIES else {}
    config = TurbomindEngineConfig(
        session_len=SESSION,
        max_batch_size=ROWS,
        cache_max_entry_count=CACHE_SHARE,
        num_threads=threads,
        **options,
    )
    settled = resolve(path, config)
    engine = build_engine(settled)
    names = iter(range(1 << 60))

    def generate(prompts: Prompts, new: int, tick: Tick) -> None:
        index = {}
        for i, prompt in enumerate(prompts):
            name = str(next(names))
            index[name] = i
            engine.add(Request(name, np.array(prompt, np.int32), max_new_tokens=new))
        while engine.has_work:
            tick([index[event.request_id] for event in engine.step() for _ in event.token_ids])

    with_limits = timed(generate, 40_000)
    kernels = _turbomind.kernels
    table = kernels.Table.get(kernels.active())
    checkpoint = open_checkpoint(settled.model_path, None)
    needs = needs_of(checkpoint)
    checkpoint.close()

    def limits() -> tuple[float, float, float]:
        """Bytes per second of a plain read; int8 and bfloat16 products per second."""
        read = kernels.read_speed(table, READ_BYTES, threads, LIMIT_REPEATS)
        int8, wide, _ = kernels.peaks(table, threads, LIMIT_REPEATS)
        return read, int8, wide

    def measure(request: dict[str, Any]) -> dict[str, Any]:
        before = limits()
        answer = with_limits(request)
        best = [max(pair) for pair in zip(before, limits(), strict=True)]
        return {**answer, "read": best[0], "int8_peak": best[1], "float_peak": best[2], **needs}

    generate([[1, 2, 3]], 2, lambda advanced: None)
    return measure, {"version": __version__, "kernels": kernels.active()}


def needs_of(checkpoint: Any) -> dict[str, Any]:
    """Bytes of weights a decode step must read, bytes of cache for each token of context, and parameters of
    the layers' matrices."""
    from lmdeploy.turbomind.layout import model_layout

    spec = checkpoint.spec
    layout = model_layout(spec, {name: checkpoint.info(name) for name in checkpoint.names()})
    gathered = 0 if spec.tie_embeddings else layout.embedding.nbytes
    parameters = sum(x.out_features * x.in_features for i in range(len(spec.layers)) for x in spec.linears(i))
    return {
        "weight_bytes": layout.nbytes - gathered,
        "kv_bytes": spec.kv_bytes_per_token(2),
        "linear_parameters": parameters,
    }


if __name__ == "__main__":
    serve(load)
