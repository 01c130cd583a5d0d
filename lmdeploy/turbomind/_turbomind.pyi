# Types of the extension module; what it does is said in csrc/bindings.
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

class InputFormat:
    def __init__(self, k: int, group: int, bf16: int, f32: bool, threshold: float) -> None: ...

class LayerShape:
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope: int
    window: int
    scale: float
    softcap: float
    qk_norm: bool
    qk_norm_across: bool
    pre_norm: bool
    post_norm: bool
    residual_scale: float
    intermediate: int
    activation: int
    qkv_input: InputFormat
    o_input: InputFormat
    gate_up_input: InputFormat
    down_input: InputFormat

class ModelShape:
    hidden: int
    vocab: int
    norm_eps: float
    norm_offset: float
    embedding_scale: float
    logit_scale: float
    logit_softcap: float
    head_input: InputFormat
    layers: list[LayerShape]
    rope: list[list[float]]
    rope_scale: list[float]

class Limits:
    max_step_tokens: int
    max_rows: int
    max_context: int
    block_size: int
    num_blocks: int
    threads: int
    kv_bits: int

class Model:
    def __init__(self, shape: ModelShape, limits: Limits, cpus: Sequence[int], weight_bytes: int) -> None: ...
    def add_matrix(self, kind: int, n: int, k: int, group: int) -> int: ...
    def pack(
        self,
        matrix: int,
        kind: int,
        group: int,
        codes: npt.NDArray[Any],
        parameters: tuple[npt.NDArray[Any], ...],
        dst_row: int,
        run: int,
    ) -> None: ...
    def pack_file(
        self,
        matrix: int,
        form: int,
        k: int,
        group: int,
        data: npt.NDArray[Any],
        rows: npt.NDArray[np.int32] | None,
        scales: npt.NDArray[np.uint16] | None,
        zeros: npt.NDArray[np.uint8] | None,
        dst_row: int,
        run: int,
    ) -> int: ...
    def add_vector(self, values: npt.NDArray[np.float32]) -> int: ...
    def place_vector(self, count: int) -> int: ...
    def place_order(self, layer: int, role: str, count: int) -> None: ...
    def image(self) -> npt.NDArray[np.uint8]: ...
    def read_image(self, fd: int, nbytes: int, piece: int, sums: npt.NDArray[np.uint64]) -> int: ...
    def set_order(self, layer: int, role: str, order: npt.NDArray[np.int32]) -> None: ...
    def set_linear(self, layer: int, role: str, matrices: Sequence[int], bias: int) -> None: ...
    def set_vector(self, layer: int, role: str, vector: int) -> None: ...
    def set_embedding(self, matrix: int) -> None: ...
    def step(
        self,
        batch: tuple[object, ...],
        samples: tuple[object, ...],
        output: tuple[object, ...],
        logits: Mapping[int, npt.NDArray[np.float32]],
        masks: tuple[object, ...] | None = None,
    ) -> None: ...
    def fill_cache(self, bits: int) -> None: ...
    def set_profile(self, on: bool) -> None: ...
    def profile(self) -> list[list[tuple[str, float, int]]]: ...
    @property
    def weight_bytes_used(self) -> int: ...
    @property
    def workspace_bytes(self) -> int: ...
    @property
    def cache_bytes(self) -> int: ...

def workspace_bytes(shape: ModelShape, limits: Limits) -> int: ...
def checksum(data: npt.NDArray[np.uint8]) -> int: ...
def layout_fingerprint() -> int: ...
def philox4x32(counter: Sequence[int], key: Sequence[int]) -> list[int]: ...

kernels: Any
