"""Quantised matrices of a Hugging Face directory as single tensors.

`X.qweight`, `X.scales` and so on become one `X.weight`; what is not quantised stays as it is. Which modules
those are, the tensors show (modules_to_not_convert and its like say the same beforehand). Knows no layout: a
`Scheme` does.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from lmdeploy.errors import ModelError
from lmdeploy.models.checkpoint import TensorInfo
from lmdeploy.models.formats.module import Module, Scheme
from lmdeploy.models.safetensors_dir import SafetensorsStore
from lmdeploy.quant.tensors import StoredMatrix, Tensor


class QuantisedStore:
    """A store of tensors by the names they would have unquantised. Opening checks every header."""

    def __init__(self, store: SafetensorsStore, scheme: Scheme) -> None:
        self._store, self._scheme, self.source = store, scheme, store.source
        self.notes, self.model_format, self.files = scheme.notes, scheme.name, store.files
        present = set(store.names())
        marked = (name.rpartition(".") for name in present)
        names = sorted({stem for stem, _, last in marked if last in scheme.marks})
        if not names:
            raise ModelError(
                f"{self.source}: config.json declares {scheme.name!r} weights, but no tensor ends in"
                f" {' or '.join(scheme.marks)}; description and weights do not belong together."
            )
        self._modules = {f"{name}.weight": self._module(name, present) for name in names}
        self._infos = {name: self._info(module) for name, module in self._modules.items()}
        used = {f"{module.name}.{part}" for module in self._modules.values() for part in module.headers}
        self._plain = present - used

    def _module(self, name: str, present: set[str]) -> Module:
        parts = [part for part in self._scheme.parts if f"{name}.{part}" in present]
        if f"{name}.weight" in present and "weight" not in parts:
            raise ModelError(
                f"{self.source}: tensor '{name}.weight' is there beside '{name}.{parts[0]}', which stands for"
                " the same matrix; only one of them can be meant."
            )
        return Module(self.source, name, {part: self._store.header(f"{name}.{part}") for part in parts})

    def _info(self, module: Module) -> TensorInfo:
        matrix = self._scheme.matrix(module)
        stored = sum(header.nbytes for header in module.headers.values())
        return TensorInfo(
            matrix.shape,
            matrix.kind,
            matrix.bits,
            matrix.group_size,
            stored,
            matrix.ordered,
            matrix.inputs,
        )

    def names(self) -> Iterable[str]:
        return self._plain | self._modules.keys()

    def info(self, name: str) -> TensorInfo:
        return self._infos[name] if name in self._infos else self._store.info(name)

    def read(self, name: str) -> Tensor:
        module = self._modules.get(name)
        if module is None:
            return self._store.read(name)
        parts = {part: self._store.stored(f"{module.name}.{part}") for part in module.headers}
        return self._scheme.read(module, parts)

    def groups(self, name: str) -> npt.NDArray[np.integer]:
        groups: npt.NDArray[np.integer] = self._store.stored(
            f"{self._modules[name].name}.{self._scheme.order_part}"
        )
        return groups

    def stored_matrix(self, name: str) -> StoredMatrix | None:
        module = self._modules.get(name)
        if module is None:
            return self._store.stored_matrix(name)
        parts = {part: self._store.stored(f"{module.name}.{part}") for part in module.headers}
        return self._scheme.stored(module, parts)

    def release(self, name: str) -> None:
        module = self._modules.get(name)
        names = [name] if module is None else [f"{module.name}.{part}" for part in module.headers]
        for one in names:
            self._store.release(one)

    def close(self) -> None:
        self._store.close()
