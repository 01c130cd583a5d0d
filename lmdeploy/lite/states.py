"""Hidden states of all calibration windows between two layers, in a file: memory holds one window at a time.

Read and written piece by piece and never mapped, so that pages of the file do not count as the process's own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import torch

_BYTES = 4


class HiddenStates:
    """float32 [tokens of the window, hidden] for each window. A file being written has another name until
    `finish`, so that one found under its own name is whole."""

    def __init__(self, path: Path, lengths: Sequence[int], hidden: int, *, write: bool = False) -> None:
        self.path, self.lengths, self._hidden = path, tuple(lengths), hidden
        self._begins = np.concatenate([[0], np.cumsum(self.lengths)]).tolist()
        self._partial = path.with_name(path.name + ".partial")
        self._file = (self._partial if write else path).open("w+b" if write else "rb", buffering=0)

    def __len__(self) -> int:
        return len(self.lengths)

    def __enter__(self) -> HiddenStates:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def read(self, window: int) -> torch.Tensor:
        values = np.empty((self.lengths[window], self._hidden), np.float32)
        self._file.seek(self._begins[window] * self._hidden * _BYTES)
        view, done = memoryview(values.data).cast("B"), 0
        while done < len(view):
            count = self._file.readinto(view[done:])
            if not count:
                raise OSError(f"{self.path} is shorter than it was")
            done += count
        return torch.from_numpy(values)

    def append(self, values: torch.Tensor) -> None:
        """The next window."""
        view = memoryview(np.ascontiguousarray(values.numpy(), np.float32).data).cast("B")
        while view:
            view = view[self._file.write(view) :]

    def finish(self) -> None:
        """The file is whole and safe."""
        os.fsync(self._file.fileno())
        self._file.close()
        self._partial.replace(self.path)
