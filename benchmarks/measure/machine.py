"""The processor's name and how much of it others use. Standard library only: peers import it."""

from __future__ import annotations

import os
import platform
import resource
import time
from pathlib import Path


def processor() -> str:
    """Name and number of cores, as for the head of a result table."""
    name = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        fields = (line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
        facts = {key.strip(): value.strip() for key, value in fields}
        model = f"family {facts.get('cpu family', '?')} model {facts.get('model', '?')}"
        name = f"{facts.get('model name', name)} ({model})"
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def renice(pid: int, value: int) -> None:
    """Sets the niceness of every thread a process has now; those it starts later inherit it.

    Where Linux groups processes by session, niceness counts within a session only, so that of its group is
    set too: the process must have been started in a session of its own.
    """
    group = Path(f"/proc/{pid}/autogroup")
    if group.exists():
        group.write_text(str(value))
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.setpriority(os.PRIO_PROCESS, int(task.name), value)


class Watch:
    """CPU seconds of this process and its ended children, and of everybody else, since creation."""

    def __init__(self) -> None:
        self._begin, self._all, self._own = time.perf_counter(), _busy(), _own()

    def own(self) -> float:
        """CPU seconds used here."""
        return _own() - self._own

    def others(self) -> float:
        """Share of the machine's CPU time that others took (other processes, and the hypervisor), 0 to 1."""
        wall = (time.perf_counter() - self._begin) * (os.cpu_count() or 1)
        taken = _busy() - self._all - self.own()
        return min(max(0.0, taken / wall), 1.0) if wall > 0 else 0.0


def _busy() -> float:
    """CPU seconds of the machine in anything but idling and waiting for disks."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, *rest = (int(x) for x in file.readline().split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def _own() -> float:
    uses = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in uses)


def peak_megabytes() -> float:
    """Largest resident size of this process or of an ended child, in 10^6 bytes."""
    return (
        max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        * 1.024e-3
    )
