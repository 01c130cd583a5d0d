"""One command as a process of its own: its output, time, memory, and an end when it takes too long."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PAUSE = 0.05  # seconds between looks


@dataclass(frozen=True, slots=True)
class Ended:
    """status: the exit status, None when it was stopped for its time. output: its standard output."""

    status: int | None
    output: str
    seconds: float
    cpu_seconds: float
    peak_mb: float


def spawn(command: list[str], log: Path, timeout: float) -> Ended:
    """Runs to its end; both outputs go to `log`, standard output beside it too."""
    log.parent.mkdir(parents=True, exist_ok=True)
    output = log.with_suffix(".out")
    begin = time.perf_counter()
    with log.open("w") as errors, output.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=errors, env=_environment(command[0]))
        stopped = False
        while (ended := os.wait4(process.pid, os.WNOHANG))[0] == 0:
            time.sleep(_PAUSE)
            if not stopped and time.perf_counter() - begin > timeout:
                process.kill()
                stopped = True
    _, status, used = ended
    process.returncode = os.waitstatus_to_exitcode(status)  # so that Popen does not wait for it again
    said = output.read_text(errors="replace")
    with log.open("a") as errors:
        errors.write(said)
    seconds, cpu = time.perf_counter() - begin, used.ru_utime + used.ru_stime
    return Ended(None if stopped else process.returncode, said, seconds, cpu, used.ru_maxrss / 1024)


def _environment(program: str) -> dict[str, str]:
    """Our own Python finds this tree first; another environment's is not to see it."""
    rest = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if program != sys.executable:
        return rest
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**rest, "PYTHONPATH": os.pathsep.join(paths)}
