"""From the start of a process to its first token, phase by phase.

    python benchmarks/start_time.py MODEL ...

A fresh Python process imports the package, loads the model with the text side beside it and answers a short
prompt; best and median of `--runs` whole processes, the files in the file cache. Phases: what Python itself
takes, imports, the plan, weights and tokenizer together, the first token. Then two parts alone: the text
side, and the weights with the ratio to a plain read of the same bytes into new memory on as many threads. CPU
seconds stand beside the wall clock's, for machines with other work: what a quiet one takes lies between.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from measure.arguments import described, model_path, positive

PHASES = ("python", "imports", "plan", "load", "first token")


def worker(model: str, started: float) -> None:
    """One start; prints the phases' wall and CPU seconds."""
    marks = [(started, 0.0), (time.time(), time.process_time())]

    def mark() -> None:
        marks.append((time.time(), time.process_time()))

    from lmdeploy import GenerationConfig, TurbomindEngineConfig
    from lmdeploy.pipeline.load import load
    from lmdeploy.runtime.resolve import resolve

    mark()
    config = resolve(model, TurbomindEngineConfig(session_len=2048, max_batch_size=1))
    mark()
    pipe = load(config)
    mark()
    next(pipe.stream_infer("Hello", gen_config=GenerationConfig(max_new_tokens=4, ignore_eos=True)))
    mark()
    print(json.dumps([(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(marks)]))


def parts(model: str) -> None:
    """The two halves of loading alone, in this process."""
    from lmdeploy import TurbomindEngineConfig
    from lmdeploy.runtime.build import build_engine
    from lmdeploy.runtime.generate import load_frontend
    from lmdeploy.runtime.resolve import resolve

    config = resolve(model, TurbomindEngineConfig(session_len=2048, max_batch_size=1))
    begin = time.perf_counter()
    load_frontend(Path(config.model_path), session_len=config.session_len, vocab_size=config.vocab_size)
    text = time.perf_counter() - begin
    begin = time.perf_counter()
    build_engine(config)
    weights = time.perf_counter() - begin
    print(json.dumps([text, weights, plain_read(Path(model), config.limits.num_threads)]))


def plain_read(model: Path, threads: int) -> float:
    """Seconds to read the packed weights into new memory with nothing checked; 0: no such file."""
    import mmap
    import os
    from concurrent.futures import ThreadPoolExecutor

    file = model / "packed.bin"
    if not file.is_file():
        return 0.0
    size, piece = file.stat().st_size, 4 << 20
    memory = mmap.mmap(-1, -(-size // piece) * piece)
    memory.madvise(mmap.MADV_HUGEPAGE)
    handle = os.open(file, os.O_RDONLY)
    view = memoryview(memory)
    begin = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda at: os.preadv(handle, [view[at : at + piece]], at), range(0, size, piece)))
    return time.perf_counter() - begin


def run(kind: str, model: str) -> list[list[float]]:
    command = [sys.executable, __file__, kind, model, repr(time.time())]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: list[list[float]] = json.loads(done.stdout.splitlines()[-1])
    return result


def report(model: str, runs: int) -> None:
    starts = [run("--worker", model) for _ in range(runs)]
    walls = [sum(wall for wall, _ in start) for start in starts]
    best = starts[walls.index(min(walls))]
    cpu = min(sum(cpu for _, cpu in start) for start in starts)
    print(
        f"{Path(model).name}: first token after {min(walls):.2f} s (median {statistics.median(walls):.2f}),",
        end=" ",
    )
    print(f"{cpu:.2f} s of CPU, {runs} runs")
    for phase, (wall, seconds) in zip(PHASES, best, strict=True):
        print(f"  {phase:<12} {wall:6.3f} s   CPU {seconds:6.3f} s")
    halves = [run("--parts", model) for _ in range(runs)]
    text, weights, read = (min(one[i] for one in halves) for i in range(3))
    print(f"  of load alone: text side {text:.3f} s, weights {weights:.3f} s", end="")
    print(f", plain read {read:.3f} s, ratio {weights / read:.2f}" if read else "")


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        return worker(sys.argv[2], float(sys.argv[3]))
    if sys.argv[1:2] == ["--parts"]:
        return parts(sys.argv[2])
    parser = described(__doc__)
    parser.add_argument("model", type=model_path, nargs="+")
    parser.add_argument("--runs", type=positive, default=5)
    args = parser.parse_args()
    for model in args.model:
        report(str(model), args.runs)


if __name__ == "__main__":
    main()
