"""What `read_machine` makes of recorded machines: bare, and in control groups of both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lmdeploy.runtime.machine import Machine, read_machine, resident_bytes

MIB, GIB = 2**20, 2**30

# Recorded on a machine of 2 cores and 24 GiB; other numbers are edited in by the tests.
MEMINFO = """MemTotal:       24684084 kB
MemFree:        23618440 kB
MemAvailable:   24112400 kB
Buffers:           18024 kB
Cached:           633084 kB
HugePages_Total:       4
HugePages_Free:        3
HugePages_Rsvd:        0
Hugepagesize:       2048 kB
"""
CPUINFO = """processor\t: 0
model name\t: AMD EPYC
flags\t\t: fpu sse2 avx2 avx512f avx512_vnni

processor\t: 1
model name\t: AMD EPYC
flags\t\t: fpu
"""
V2_MOUNTS = """24 30 0:22 / /proc rw,nosuid - proc proc rw
31 23 0:28 / /sys/fs/cgroup rw,nosuid,nodev,noexec - cgroup2 cgroup2 rw,nsdelegate
"""
V1_MOUNTS = """31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
UNLIMITED_V1 = "9223372036854771712"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def read(root: Path, files: dict[str, str], cpus: tuple[int, ...] = (0, 1)) -> Machine:
    write(root, {"proc/meminfo": MEMINFO, "proc/cpuinfo": CPUINFO, **files})
    return read_machine(root, cpus)


def v2(group: str, **limits: str) -> dict[str, str]:
    """Files of one version 2 group below /sys/fs/cgroup."""
    return {f"sys/fs/cgroup{group}/{name.replace('__', '.')}": text + "\n" for name, text in limits.items()}


def v1(controller: str, group: str, **limits: str) -> dict[str, str]:
    folder = f"sys/fs/cgroup/{controller}{group}"
    return {f"{folder}/{name.replace('__', '.')}": text + "\n" for name, text in limits.items()}


def test_bare_machine(tmp_path: Path) -> None:
    thp = {"sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n"}
    machine = read(tmp_path, thp)
    assert machine.memory_total == 24684084 * 1024
    assert machine.memory_free == 24112400 * 1024
    assert machine.memory_bound == "machine"
    assert (machine.cores, machine.logical_cpus, machine.cpu_quota) == (2, 2, None)
    assert machine.cpu_model == "AMD EPYC"
    assert machine.cpu_features == {"fpu", "sse2", "avx2", "avx512f", "avx512_vnni"}
    pages = machine.huge_pages
    assert (pages.transparent, pages.reserved, pages.reserved_free) == ("madvise", 4, 3)
    assert pages.size == 2 * MIB


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    machine = read_machine(tmp_path, [0])
    assert (machine.cores, machine.memory_free, machine.cpu_model) == (1, 0, "unknown")
    assert machine.huge_pages.transparent == "absent"


def test_v2_group_limits_memory_and_cache_counts_as_free(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/app.slice/job\n",
        "proc/self/mountinfo": V2_MOUNTS,
        **v2("/app.slice/job", memory__max=str(4 * GIB), memory__high="max", memory__current=str(3 * GIB)),
        **v2("/app.slice/job", memory__stat=f"anon 1\nactive_file {GIB}\ninactive_file {GIB // 2}"),
        **v2("/app.slice", memory__max="max", memory__current=str(5 * GIB)),
    }
    machine = read(tmp_path, files)
    assert machine.memory_free == 4 * GIB - (3 * GIB - GIB - GIB // 2)
    assert machine.memory_bound.endswith("/sys/fs/cgroup/app.slice/job")


def test_v2_outer_group_and_soft_limit_bind(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/outer/inner\n",
        "proc/self/mountinfo": V2_MOUNTS,
        **v2("/outer/inner", memory__max=str(8 * GIB), memory__current=str(GIB)),
        **v2("/outer", memory__max=str(9 * GIB), memory__high=str(3 * GIB), memory__current=str(2 * GIB)),
    }
    machine = read(tmp_path, files)
    assert machine.memory_free == GIB
    assert machine.memory_bound.endswith("/outer")


def test_v1_group_limits_memory(tmp_path: Path) -> None:
    stat = f"cache 1\ntotal_active_file {MIB}\ntotal_inactive_file {MIB}\n"
    files = {
        "proc/self/cgroup": "9:name=systemd:/\n4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/\n",
        "proc/self/mountinfo": V1_MOUNTS,
        **v1("memory", "/docker/abc", memory__limit_in_bytes=str(2 * GIB), memory__stat=stat),
        **v1("memory", "/docker/abc", memory__usage_in_bytes=str(GIB)),
        **v1("memory", "/docker", memory__limit_in_bytes=UNLIMITED_V1, memory__usage_in_bytes=str(GIB)),
        **v1("memory", "", memory__limit_in_bytes=UNLIMITED_V1, memory__usage_in_bytes=str(GIB)),
        **v1("cpu,cpuacct", "/docker/abc", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000"),
        **v1("cpu,cpuacct", "/docker", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000"),
    }
    machine = read(tmp_path, files)
    assert machine.memory_free == 2 * GIB - (GIB - 2 * MIB)
    assert machine.memory_bound.endswith("memory/docker/abc")
    assert machine.cpu_quota == 1.5
    assert machine.cores == 1


def test_v1_container_sees_its_group_as_the_root_of_the_mount(tmp_path: Path) -> None:
    mounts = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    files = {
        "proc/self/cgroup": "4:memory:/docker/abc\n",
        "proc/self/mountinfo": mounts,
        **v1("memory", "", memory__limit_in_bytes=str(GIB), memory__usage_in_bytes="0"),
    }
    assert read(tmp_path, files).memory_free == GIB


def test_v1_limit_of_a_hidden_ancestor(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/elsewhere\n",
        "proc/self/mountinfo": "35 31 0:32 /docker /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
        **v1("memory", "", memory__limit_in_bytes=UNLIMITED_V1, memory__usage_in_bytes="0"),
        **v1("memory", "", memory__stat=f"hierarchical_memory_limit {GIB}"),
    }
    assert read(tmp_path, files).memory_free == GIB


def test_v2_namespace_path_outside_the_mount(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/../../job\n",
        "proc/self/mountinfo": V2_MOUNTS,
        **v2("", memory__max=str(GIB), memory__current="0"),
    }
    assert read(tmp_path, files).memory_free == GIB


def test_a_limit_above_the_machine_does_not_bind(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/job\n",
        "proc/self/mountinfo": V2_MOUNTS,
        **v2("/job", memory__max=str(999 * GIB), memory__current="0"),
    }
    assert read(tmp_path, files).memory_bound == "machine"


def test_an_exhausted_group_has_nothing_free(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/job\n",
        "proc/self/mountinfo": V2_MOUNTS,
        **v2("/job", memory__max=str(GIB), memory__current=str(2 * GIB)),
    }
    assert read(tmp_path, files).memory_free == 0


LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max cpu time              unlimited            unlimited            seconds
Max address space         {}           unlimited            bytes
"""


def test_a_limited_address_space_binds(tmp_path: Path) -> None:
    """`ulimit -v`: what the process has mapped and what a process maps beside its memory are taken off."""
    status = {"proc/self/status": "Name:\tpython\nVmSize:\t  204800 kB\nVmRSS:\t 102400 kB\n"}
    machine = read(tmp_path, {**status, "proc/self/limits": LIMITS.format(2000 * 2**20)})
    assert machine.memory_free == (2000 - 200 - 256) * 2**20
    assert machine.memory_bound == "/proc/self/limits (ulimit -v)"
    free = read(tmp_path, {**status, "proc/self/limits": LIMITS.format("unlimited")})
    assert free.memory_bound == "machine"


@pytest.mark.parametrize(("text", "cores"), [("max 100000", 2), ("400000 100000", 2), ("50000 100000", 1)])
def test_v2_cpu_quota(tmp_path: Path, text: str, cores: int) -> None:
    files = {
        "proc/self/cgroup": "0::/job\n",
        "proc/self/mountinfo": V2_MOUNTS,
        **v2("/job", cpu__max=text),
    }
    assert read(tmp_path, files).cores == cores


def test_hardware_threads_of_one_core_count_once(tmp_path: Path) -> None:
    siblings = {0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5"}
    files = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": text + "\n"
        for cpu, text in siblings.items()
    }
    assert read(tmp_path, files, cpus=(0, 1, 4, 5)).cores == 2
    assert read(tmp_path, files, cpus=(0, 4)).cores == 1
    assert read(tmp_path, files, cpus=(0, 5)).cores == 2


def test_this_machine() -> None:
    machine = read_machine()
    assert 1 <= machine.cores <= len(os.sched_getaffinity(0))
    assert 0 < machine.memory_free <= machine.memory_total
    assert 2 * MIB < resident_bytes() < machine.memory_total
