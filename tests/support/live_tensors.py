"""How many bytes of torch tensors are alive at once, counted by storage as operations make them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveTensors(TorchDispatchMode):
    """Use as a context; tensors made before (`known`) do not count. `peak` in bytes."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._sizes = {t.untyped_storage()._cdata: 0 for t in known}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self._now += self._sizes[key]
            self.peak = max(self.peak, self._now)
            weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self._now -= self._sizes.pop(key)
