"""Where one step of the native engine spends its time, each operation beside its own limit.

    python benchmarks/profile_step.py [--model PATH] [--decode 1 8 32] [--context 512] [--prefill 512]
    python benchmarks/profile_step.py --decode 1 --docs docs/performance.md    also into that page

For each operation: the time (mean over threads; of all steps the value at the fastest tenth), the bytes and
operations it must move, and the time these take at the speeds that this process measures before and after: a
plain read of as many bytes as lie in the same memory (all weights; all cached keys and values; or the rows in
the caches of the CPU) and the product peak of the instructions used, divided by the number of activation
planes (with accuracy=auto one, though some groups have two). "barrier" is waiting for other threads; "host"
is everything outside the parallel region: scheduling, packing, Python, waking threads.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from measure.arguments import described, model_path, positive
from measure.demo import demo_model
from measure.machine import Watch
from measure.page import write_between

from lmdeploy import TurbomindEngineConfig
from lmdeploy.config import NATIVE_DTYPES
from lmdeploy.engine.request import Request, SamplingParams
from lmdeploy.models.registry import open_checkpoint
from lmdeploy.models.spec import ModelSpec
from lmdeploy.runtime.build import build_engine
from lmdeploy.runtime.resolve import resolve
from lmdeploy.turbomind import _turbomind
from lmdeploy.turbomind.accuracy import ALWAYS, THRESHOLDS
from lmdeploy.turbomind.layout import BF16, FP16, InputLayout, LinearLayout, ModelLayout, model_layout

K = _turbomind.kernels
FEW_ROWS = 4  # up to here every thread prepares all rows for itself (csrc/workspace.h)


@dataclass
class Work:
    """What an operation must move in one step. `seconds`: of its arithmetic at the peak."""

    weights: float = 0  # bytes, each read once
    cache: float = 0  # bytes of keys and values
    rows: float = 0  # bytes of activations, read and written
    operations: float = 0
    seconds: float = 0


@dataclass
class Machine:
    """Speeds of this machine in this process: bytes and operations per second of all threads."""

    threads: int
    table: Any = field(default_factory=lambda: K.Table.get(K.active()))

    def __post_init__(self) -> None:
        self.int8, self.bf16, self.fma = K.peaks(self.table, self.threads, 8)
        self.read = cache(self._read)

    def _read(self, log2: int) -> float:
        return float(K.read_speed(self.table, 1 << log2, self.threads, 8))

    def read_seconds(self, moved: float, resident: float) -> float:
        """Of `moved` bytes that lie among `resident` bytes which take turns."""
        size = min(max(resident, 1 << 17), 1 << 30)
        return moved / self.read(max(int(size).bit_length() - 1, 17)) if moved else 0.0

    def peak(self, kind: int, layout: InputLayout) -> float:
        """Operations per second of a weight kind with the planes that its input is prepared in."""
        if kind == FP16:
            return self.fma
        if kind == BF16:
            return self.bf16 / layout.bf16
        return self.int8 / (2 if layout.threshold == ALWAYS else 1)


@dataclass(frozen=True)
class Step:
    """Rows of one step: (new tokens, cached tokens before) of each, of which the last token is sampled."""

    rows: list[tuple[int, int]]

    @property
    def tokens(self) -> int:
        return sum(new for new, _ in self.rows)

    def pairs(self, window: int | None) -> float:
        """Query and key pairs that attention visits."""
        seen = [min(p + 1, window or p + 1) for new, before in self.rows for p in range(before, before + new)]
        return float(sum(seen))

    def cached(self, window: int | None) -> float:
        """Tokens whose keys and values are read at least once."""
        return float(sum(min(new + before, (window or 1 << 40) + new) for new, before in self.rows))


def linear_work(linear: LinearLayout, tokens: int, machine: Machine) -> Work:
    work = Work()
    for m in linear.matrices:
        operations = 2.0 * m.n * m.k * tokens
        work.weights += m.nbytes
        work.operations += operations
        work.seconds += operations / machine.peak(m.kind, linear.input)
    return work


def prepared_bytes(layout: InputLayout, tokens: int) -> float:
    return 4.0 * layout.k * tokens + layout.nbytes(tokens)


def add(total: dict[str, Work], op: str, work: Work) -> None:
    into = total.setdefault(op, Work())
    for name in ("weights", "cache", "rows", "operations", "seconds"):
        setattr(into, name, getattr(into, name) + getattr(work, name))


def step_work(spec: ModelSpec, layout: ModelLayout, step: Step, machine: Machine) -> dict[str, Work]:
    """What each operation of the step must move."""
    total: dict[str, Work] = {}
    tokens, samples = step.tokens, len(step.rows)
    copies = machine.threads if tokens <= FEW_ROWS else 1
    add(total, "embed", Work(weights=layout.embedding.nbytes / layout.embedding.n * 16 * tokens))
    for spec_layer, layer in zip(spec.layers, layout.layers, strict=True):
        a = spec_layer.attention
        for linear in (layer.qkv, layer.o, layer.gate_up):
            add(total, "prepare", Work(rows=copies * prepared_bytes(linear.input, tokens)))
        linears: tuple[tuple[str, LinearLayout], ...] = (
            ("qkv", layer.qkv),
            ("o", layer.o),
            ("gate_up", layer.gate_up),
            ("down", layer.down),
        )
        for op, linear in linears:
            add(total, op, linear_work(linear, tokens, machine))
        q_dim, kv_dim = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        add(total, "rope_store", Work(rows=(8.0 * q_dim + 2 * (4.0 + 2.0) * kv_dim) * tokens))
        operations = 4.0 * q_dim * step.pairs(a.window)
        cached = 4.0 * kv_dim * step.cached(a.window)
        add(total, "attention", Work(cache=cached, operations=operations, seconds=operations / machine.fma))
        width = spec_layer.ffn.intermediate_size
        add(total, "activation", Work(rows=8.0 * width * tokens + layer.down.input.nbytes(tokens)))
        add(total, "residual", Work(rows=2 * 12.0 * spec.hidden_size * tokens))
    head = layout.head or layout.embedding
    add(total, "prepare", Work(rows=prepared_bytes(layout.head_input, samples)))
    add(total, "head", linear_work(LinearLayout(layout.head_input, (head,)), samples, machine))
    for op in ("finish", "sample"):
        add(total, op, Work(rows=4.0 * spec.vocab_size * samples))
    return total


def limit_seconds(work: Work, machine: Machine, layout: ModelLayout, step: Step, all_cache: float) -> float:
    memory = machine.read_seconds(work.weights, layout.nbytes)
    memory += machine.read_seconds(work.cache, all_cache)
    memory += machine.read_seconds(work.rows, 16.0 * layout.layers[0].qkv.input.k * step.tokens)
    return max(memory, work.seconds)


class Runner:
    """An engine on one model, stepped and measured."""

    def __init__(self, model: Path, args: argparse.Namespace, rows: int, tokens: int) -> None:
        config = TurbomindEngineConfig(
            session_len=tokens,
            max_batch_size=rows,
            num_threads=args.threads,
            max_prefill_token_num=max(512, args.prefill),
            enable_prefix_caching=False,
            accuracy=args.accuracy,
            dtype=args.dtype,
        )
        self.engine = build_engine(resolve(str(model), config))
        self.executor: Any = self.engine.executor
        self._random, self._vocab = np.random.default_rng(0), self.executor.capabilities().vocab_size
        self._count = 0
        self._sampling = SamplingParams(temperature=args.temperature, top_p=args.top_p)

    def add(self, prompt: int, new: int) -> None:
        ids = self._random.integers(0, self._vocab, prompt, dtype=np.int32)
        self._count += 1
        self.engine.add(Request(str(self._count), ids, new, self._sampling))

    def step(self) -> dict[str, float]:
        """Seconds by operation, "host" with them; counts under "barriers"."""
        begin = time.perf_counter()
        self.engine.step()
        whole = time.perf_counter() - begin
        profile = self.executor.profile()
        times = {name: op.seconds for name, op in profile.items()}
        times["host"] = whole - sum(times.values())
        return times | {"barriers": profile["barrier"].times if profile else 0}

    def decode(self, rows: int, context: int, steps: int) -> list[dict[str, float]]:
        for _ in range(rows):
            self.add(context, steps + rows + 8)
        started: set[str] = set()
        while len(started) < rows:
            started |= {event.request_id for event in self.engine.step()}
        self.executor.set_profile(True)
        return [self.step() for _ in range(steps)]

    def prefill(self, tokens: int, steps: int) -> list[dict[str, float]]:
        self.executor.set_profile(True)
        times = []
        for _ in range(steps):
            self.add(tokens, 1)
            times.append(self.step())
            while self.engine.has_work:
                self.engine.step()
        return times


def typical(steps: list[dict[str, float]]) -> dict[str, float]:
    """For each operation by itself the value that a tenth of the steps stay below: other processes disturb
    most steps of a long one somewhere, but seldom the same operation."""
    return {name: sorted(step[name] for step in steps)[len(steps) // 10] for name in steps[0]}


def table(times: dict[str, float], work: dict[str, Work], limit: Callable[[Work], float]) -> Iterator[str]:
    barriers = times.pop("barriers")
    total = sum(times.values())
    yield "| operation | ms | share | MB | GOP | limit ms | ratio |"
    yield "|---|---|---|---|---|---|---|"
    whole = 0.0
    for name, seconds in times.items():
        row = f"| {name} | {seconds * 1e3:.3f} | {seconds / total:.1%} |"
        if name in work:
            w, bound = work[name], limit(work[name])
            whole += bound
            moved = (w.weights + w.cache + w.rows) / 1e6
            yield (
                row + f" {moved:.2f} | {w.operations / 1e9:.2f} | {bound * 1e3:.3f} | {seconds / bound:.2f} |"
            )
        else:
            note = f"{barriers:.0f} barriers" if name == "barrier" else ""
            yield row + f" {note} | | | |"
    yield f"| all | {total * 1e3:.3f} | | | | {whole * 1e3:.3f} | {total / whole:.2f} |"


def report(title: str, model: Path, args: argparse.Namespace, step: Step, measure: Callable[[], Any]) -> str:
    before = Machine(args.threads)
    with_checkpoint = open_checkpoint(model)
    spec = with_checkpoint.spec
    headers = {n: with_checkpoint.info(n) for n in with_checkpoint.names()}
    layout = model_layout(spec, headers, args.accuracy, args.dtype)
    with_checkpoint.close()
    work = step_work(spec, layout, step, before)
    all_cache = sum(w.cache for w in work.values())
    limits = {name: limit_seconds(w, before, layout, step, all_cache) for name, w in work.items()}
    watch = Watch()
    steps = measure()
    others = watch.others()
    times, whole = typical(steps), min(sum(step.values()) - step["barriers"] for step in steps)
    after = Machine(args.threads)
    again = step_work(spec, layout, step, after)
    # The machine may be slower at one end than at the other; a limit is what it could do at its best.
    best = {n: min(limits[n], limit_seconds(w, after, layout, step, all_cache)) for n, w in again.items()}
    read = max(m.read_seconds(1e9, layout.nbytes) ** -1 for m in (before, after))
    rows = "\n".join(table(times, work, lambda w: next(best[n] for n in work if work[n] is w)))
    text = (
        f"### {title}\n\n{rows}\n\nfastest whole step {whole * 1e3:.3f} ms; read {read:.1f} GB/s of"
        f" {layout.nbytes / 1e6:.0f} MB; peaks int8 {before.int8 / 1e9:.0f}, bfloat16"
        f" {before.bf16 / 1e9:.0f}, float {before.fma / 1e9:.0f} GOP/s; {args.threads} threads, kernels"
        f" {K.active()}; others took {others:.0%} of the CPU"
    )
    print(f"\n{text}", flush=True)
    return text


def write_page(page: Path, model: Path | None, args: argparse.Namespace, texts: list[str]) -> None:
    """Between the marks of this model, without what nobody waits for."""
    name = model.name if model else "the demo model"
    head = f"{date.today()}, {name}, accuracy {args.accuracy}. Operations above 0.5 % of the step."
    kept = [line for text in texts for line in text.splitlines() if not re.search(r"\| 0\.[0-4]% \|", line)]
    begin, end = f"<!-- profile of {name}: profile_step.py --docs -->", "<!-- end of profile -->"
    write_between(page, begin, end, "\n".join([head, *kept]).replace("### ", "\n### "))


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--model", type=model_path, help="the demo model when left out")
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--decode", type=positive, nargs="*", default=[1, 8, 32], help="sequences")
    parser.add_argument("--context", type=int, default=512, help="tokens before the decode steps")
    parser.add_argument("--prefill", type=int, default=512, help="tokens; 0: none")
    parser.add_argument("--accuracy", choices=THRESHOLDS, default="auto")
    parser.add_argument("--dtype", choices=NATIVE_DTYPES, default="auto")
    parser.add_argument("--steps", type=positive, default=40)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--docs", type=Path, help="Markdown page to write the tables into")
    args = parser.parse_args()
    model = args.model or demo_model()
    room, texts = args.steps + 64, list[str]()
    for rows in args.decode:
        runner = Runner(model, args, rows, args.context + room + rows)
        step = Step([(1, args.context + args.steps // 2)] * rows)
        title = f"decode, {rows} sequences, {args.context} tokens each"
        decode = partial(runner.decode, rows, args.context, args.steps)
        texts.append(report(title, model, args, step, decode))
        del runner, decode
    if args.prefill:
        runner = Runner(model, args, 1, args.prefill + 64)
        steps = max(3, args.steps // 8)
        step = Step([(args.prefill, 0)])
        title = f"prefill, {args.prefill} tokens"
        texts.append(report(title, model, args, step, partial(runner.prefill, args.prefill, steps)))
    if args.docs:
        write_page(args.docs, args.model, args, texts)


if __name__ == "__main__":
    main()
