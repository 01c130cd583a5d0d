"""What this machine gives the process: cores, memory, huge pages, CPU features, cards.

Reads text files below one root only (`/` outside tests), so that every machine can be described by a folder.
Knows no model and no engine.

Memory counts as free up to the smallest of MemAvailable, the room in each control group above the process,
version 1 or 2: limit - (usage - file cache), and the address space that the process may still map
(`ulimit -v`). The file cache of a group counts as free because the kernel gives it back before it refuses
memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lmdeploy.runtime.gpu import Gpu, read_gpus

ROOT = Path("/")
# Addresses a process maps beside its memory: stacks and malloc's arenas of its threads, the model's file.
_ADDRESSES_BESIDE = 256 * 2**20


@dataclass(frozen=True, slots=True)
class HugePages:
    """Large pages: transparent ones by mode, reserved ones by count."""

    transparent: str  # "always", "madvise", "never" or "absent"
    reserved: int
    reserved_free: int
    size: int  # bytes


@dataclass(frozen=True, slots=True)
class Machine:
    """Sizes in bytes; `cores` are the physical cores this process may keep busy."""

    cores: int
    logical_cpus: int
    cpu_quota: float | None
    memory_total: int
    memory_free: int
    memory_bound: str  # what bounds memory_free: "machine", or the file or directory of the limit
    huge_pages: HugePages
    cpu_model: str
    cpu_features: frozenset[str]
    gpus: tuple[Gpu, ...] = ()
    own_memory: int = 0  # anonymous memory that this process has taken already; not part of memory_free


def read_machine(root: Path = ROOT, cpus: Iterable[int] | None = None) -> Machine:
    """Describe the machine below `root`; `cpus`: those the process may run on, by default its affinity."""
    allowed = sorted(os.sched_getaffinity(0) if cpus is None else cpus)
    meminfo = _meminfo(root)
    total = meminfo.get("MemTotal", 0)
    free, bound = meminfo.get("MemAvailable", meminfo.get("MemFree", 0)), "machine"
    for directory, room in (*_memory_rooms(root), *_address_room(root)):
        if room < free:
            free, bound = room, directory
    quota = _cpu_quota(root)
    cores = _physical_cores(root, allowed)
    if quota is not None:
        cores = min(cores, int(quota))
    model, features = _cpu_info(root)
    return Machine(
        cores=max(cores, 1),
        logical_cpus=len(allowed),
        cpu_quota=quota,
        memory_total=total,
        memory_free=max(free, 0),
        memory_bound=bound,
        huge_pages=_huge_pages(root, meminfo),
        cpu_model=model,
        cpu_features=features,
        gpus=read_gpus(root),
        own_memory=anonymous_bytes(root=root),
    )


def resident_bytes(pid: int | str = "self", root: Path = ROOT) -> int:
    """Memory of a process in RAM: anonymous, file-backed and shared pages together."""
    return _status_bytes(pid, "VmRSS", root)


def anonymous_bytes(pid: int | str = "self", root: Path = ROOT) -> int:
    """Memory of a process in RAM that no file backs."""
    return _status_bytes(pid, "RssAnon", root)


def _status_bytes(pid: int | str, name: str, root: Path) -> int:
    for line in _text(root / "proc" / str(pid) / "status").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def _text(path: Path) -> str:
    """The file's text, or nothing where it cannot be read: every source here is optional."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo; sizes in bytes, counts as they are."""
    values = {}
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        parts = rest.split()
        if parts and parts[0].isdigit():
            values[name] = int(parts[0]) * (1024 if parts[1:] == ["kB"] else 1)
    return values


def _group_directories(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """(version, directory) of each control group above this process, innermost first."""
    paths = _group_paths(root)
    for line in _text(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        mount, source = left.split(), right.split()
        if len(mount) < 5 or len(source) < 3 or source[0] not in ("cgroup", "cgroup2"):
            continue
        version = 2 if source[0] == "cgroup2" else 1
        key = "" if version == 2 else controller
        if key not in paths or (version == 1 and controller not in source[2].split(",")):
            continue
        top = PurePosixPath(mount[4])
        inner = _below(paths[key], mount[3])
        for directory in (top / inner, *(top / inner).parents):
            yield version, root / str(directory).lstrip("/")
            if directory == top:
                break


def _group_paths(root: Path) -> dict[str, str]:
    """Controller -> path of the process's group; "" is the version 2 hierarchy."""
    paths = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            for name in parts[1].split(","):
                paths[name] = parts[2]
    return paths


def _below(path: str, mount_root: str) -> PurePosixPath:
    """`path` relative to what is mounted; "." where the mount shows another part of the tree."""
    try:
        relative = PurePosixPath(path).relative_to(mount_root)
    except ValueError:
        return PurePosixPath(".")
    return PurePosixPath(".") if ".." in relative.parts else relative


def _memory_rooms(root: Path) -> Iterator[tuple[str, int]]:
    """(directory, bytes still free below its limit) of every group that has a limit."""
    for version, directory in _group_directories(root, "memory"):
        stat = _stat(directory)
        if version == 2:
            limits = [_number(directory / "memory.max"), _number(directory / "memory.high")]
            used, cache = _number(directory / "memory.current"), stat.get("active_file", 0)
            cache += stat.get("inactive_file", 0)
        else:
            limits = [_number(directory / "memory.limit_in_bytes"), stat.get("hierarchical_memory_limit")]
            used, cache = _number(directory / "memory.usage_in_bytes"), stat.get("total_active_file", 0)
            cache += stat.get("total_inactive_file", 0)
        known = [x for x in limits if x is not None]
        if known and used is not None:
            yield str(directory), min(known) - max(used - cache, 0)


def _address_room(root: Path) -> Iterator[tuple[str, int]]:
    """As `_memory_rooms`, for the limit of this process's address space, if it has one."""
    sizes = [x.split() for x in _text(root / "proc/self/status").splitlines() if x.startswith("VmSize:")]
    for line in _text(root / "proc/self/limits").splitlines():
        words = line.removeprefix("Max address space").split()
        if line.startswith("Max address space") and words[0].isdigit() and sizes:
            used = int(sizes[0][1]) * 1024
            yield "/proc/self/limits (ulimit -v)", int(words[0]) - used - _ADDRESSES_BESIDE


def _stat(directory: Path) -> dict[str, int]:
    rows = (line.split() for line in _text(directory / "memory.stat").splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}


def _number(path: Path) -> int | None:
    """The file's number; None where the file is missing or says "max"."""
    text = _text(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _cpu_quota(root: Path) -> float | None:
    """CPUs the control groups allow, the smallest of all levels; None: no limit."""
    quotas = []
    for version, directory in _group_directories(root, "cpu"):
        if version == 2:
            parts = _text(directory / "cpu.max").split()
            quota, period = parts if len(parts) == 2 else ("max", "0")
        else:
            quota = _text(directory / "cpu.cfs_quota_us").strip()
            period = _text(directory / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas) if quotas else None


def _physical_cores(root: Path, cpus: Iterable[int]) -> int:
    """Distinct cores behind the CPUs: hardware threads of one core count once."""
    cores = set()
    for cpu in cpus:
        siblings = _text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").strip()
        cores.add(siblings or str(cpu))
    return len(cores)


def _cpu_info(root: Path) -> tuple[str, frozenset[str]]:
    model, features = "unknown", frozenset[str]()
    for line in _text(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            model = value.strip()
        elif name.strip() in ("flags", "Features"):
            return model, frozenset(value.split())
    return model, features


def _huge_pages(root: Path, meminfo: dict[str, int]) -> HugePages:
    modes = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    chosen = next((m.strip("[]") for m in modes.split() if m.startswith("[")), "absent")
    total, free = meminfo.get("HugePages_Total", 0), meminfo.get("HugePages_Free", 0)
    return HugePages(chosen, total, free, meminfo.get("Hugepagesize", 0))
