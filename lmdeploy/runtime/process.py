"""Starting the engine's process, and what its end means.

Owns the child's import path. Knows no message and no request.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import lmdeploy


def ending(code: int | None) -> str:
    """What an exit code says about the end of a process that was not ended by us."""
    if code is None or code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"{name}, which the system sends when memory runs out" if name == "SIGKILL" else name


# Sets the parent's import path before anything is imported: `-m` and `-c` put the current folder first, where
# a file named like a library, or a source tree without a built extension, would be imported in its place.
_BOOTSTRAP = (
    "import sys; sys.path[:] = sys.argv[2:]; del sys.argv[2:]; "
    "from lmdeploy.runtime.worker import main; sys.exit(main(sys.argv))"
)


def _import_path() -> list[str]:
    """Where this process imports from, as absolute folders and without the current one."""
    paths = [os.path.abspath(path) for path in sys.path if path]
    home = str(Path(lmdeploy.__file__).resolve().parent.parent)
    known = {os.path.realpath(path) for path in paths}
    # A package that was found through the current folder, or by an import hook, is still the one to run.
    return paths if home in known else [home, *paths]


def spawn(theirs: socket.socket) -> subprocess.Popen[bytes]:
    """A fresh interpreter (never a fork) that inherits one end of the socket and the import path."""
    return subprocess.Popen(
        [sys.executable, "-c", _BOOTSTRAP, str(theirs.fileno()), *_import_path()],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
    )
