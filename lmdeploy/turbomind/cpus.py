"""Which CPUs the compute threads run on. How many there are is decided elsewhere (`runtime.machine`)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

ANY = -1  # leave the thread to the operating system


def choose_cpus(threads: int, allowed: Iterable[int] | None = None, root: Path = Path("/")) -> list[int]:
    """One CPU per thread, on different cores as far as they reach; all `ANY` when threads must share CPUs.

    allowed: CPUs this process may use, by default its affinity mask.
    """
    cpus = sorted(os.sched_getaffinity(0) if allowed is None else allowed)
    if threads > len(cpus):
        return [ANY] * threads
    first: list[int] = []
    later: list[int] = []
    cores: set[str] = set()
    for cpu in cpus:
        core = _core(root, cpu)
        (later if core in cores else first).append(cpu)
        cores.add(core)
    return (first + later)[:threads]


def _core(root: Path, cpu: int) -> str:
    """The same text for all hardware threads of one core; a CPU of its own where the system does not say."""
    path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    try:
        return path.read_text().strip()
    except OSError:
        return f"cpu{cpu}"
