"""The torch executor: a `Batch` in, tiles of fixed shape through the model, a `StepResult` out.

Owns weights and cache. Decides nothing: limits, device, type and the number of blocks are given to it. Small
and plain: every operation is torch's own, one sequence after the other in attention, no graphs, no fusion.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from lmdeploy.engine.batch import Batch, StepResult
from lmdeploy.engine.executor import Capabilities, Limits
from lmdeploy.errors import EngineError
from lmdeploy.models.checkpoint import Checkpoint
from lmdeploy.models.reference import Decoder
from lmdeploy.models.spec import AttentionSpec, ModelSpec
from lmdeploy.pytorch.attention import Piece, attend_blocks, make_cache
from lmdeploy.pytorch.check import check_batch
from lmdeploy.pytorch.device import DTYPES, open_device, out_of_memory_is_memory_error
from lmdeploy.pytorch.plan import TILES
from lmdeploy.pytorch.sampling import empty_result, sample_row
from lmdeploy.pytorch.weights import load_weights

MAX_LOGPROBS = 1024


@dataclass(frozen=True, slots=True)
class TorchConfig:
    """Everything that is not the model's. device: "cpu" or "cuda"; dtype: of matrices and cache."""

    limits: Limits
    num_blocks: int
    device: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Tile:
    """Up to `Tiles.rows` tokens of a batch, [begin, end), cut at the borders of its rows."""

    begin: int
    end: int
    pieces: tuple[Piece, ...]
    positions: torch.Tensor  # int64 [rows], zeros in the padding
    blocks: torch.Tensor  # int64 [tokens], where each token's keys and values go
    offsets: torch.Tensor


class TorchExecutor:
    """Implements `engine.executor.Executor`. ModelError when the model cannot be computed."""

    def __init__(self, config: TorchConfig, spec: ModelSpec, checkpoint: Checkpoint) -> None:
        self._config, self._spec, self._tiles = config, spec, TILES[config.device]
        limits, dtype = config.limits, DTYPES[config.dtype]
        self._device = open_device(config.device, limits.num_threads)
        with out_of_memory_is_memory_error():
            self.weights = load_weights(checkpoint, dtype, self._device)
            self.cache = make_cache(
                spec, config.num_blocks, limits.block_size, limits.kv_bits, dtype, self._device
            )
        self._decoder: Decoder | None = Decoder(spec, self.weights)

    def capabilities(self) -> Capabilities:
        """What the engine must know."""
        limits, vocab_size = self._config.limits, self._spec.vocab_size
        return Capabilities(
            block_size=limits.block_size,
            num_blocks=self._config.num_blocks,
            max_step_tokens=limits.max_step_tokens,
            max_rows=limits.max_rows,
            vocab_size=vocab_size,
            max_logprobs=min(MAX_LOGPROBS, vocab_size),
        )

    def execute(self, batch: Batch) -> StepResult:
        """Compute one step. EngineError when the batch is not within the model's and the cache's limits."""
        if self._decoder is None:
            raise EngineError("the executor is closed")
        check_batch(batch, self.capabilities())
        result = empty_result(batch.samples)
        try:
            with torch.inference_mode(), out_of_memory_is_memory_error():
                for tile in self._cut(batch):
                    self._compute(self._decoder, batch, tile, result)
        except (MemoryError, RuntimeError) as error:
            raise EngineError(f"the batch cannot be computed: {error}") from error
        return result

    def close(self) -> None:
        """Free weights and cache."""
        self._decoder = None
        self.weights.clear()
        del self.cache

    def _cut(self, batch: Batch) -> Iterator[Tile]:
        """Tiles in order: a token's earlier ones are in the cache when its tile is computed."""
        size = self._config.limits.block_size
        counts = np.diff(batch.row_start)
        row_of = np.repeat(np.arange(batch.num_rows), counts)
        first_position = batch.context_len - batch.row_start[:-1]
        positions = np.arange(batch.num_tokens) + first_position[row_of]
        blocks = batch.block_ids[batch.block_start[row_of] + positions // size]
        for begin in range(0, batch.num_tokens, self._tiles.rows):
            end = min(begin + self._tiles.rows, batch.num_tokens)
            padded = np.zeros(self._tiles.rows, np.int64)
            padded[: end - begin] = positions[begin:end]
            yield Tile(
                begin,
                end,
                tuple(self._pieces(batch, begin, end, row_of[begin:end])),
                self._ids(padded),
                self._ids(blocks[begin:end]),
                self._ids(positions[begin:end] % size),
            )

    def _pieces(self, batch: Batch, begin: int, end: int, rows: npt.NDArray[np.intp]) -> Iterator[Piece]:
        for row in np.unique(rows):
            start, stop = max(int(batch.row_start[row]), begin), min(int(batch.row_start[row + 1]), end)
            position = int(batch.context_len[row]) + start - int(batch.row_start[row])
            blocks = batch.block_ids[batch.block_start[row] : batch.block_start[row + 1]]
            yield Piece(start - begin, stop - begin, position, self._ids(blocks))

    def _ids(self, values: npt.NDArray[np.integer]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device)

    def _compute(self, decoder: Decoder, batch: Batch, tile: Tile, result: StepResult) -> None:
        tokens = np.zeros(self._tiles.rows, np.int64)
        tokens[: tile.end - tile.begin] = batch.token_ids[tile.begin : tile.end]

        def attend(
            layer: int, a: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
        ) -> torch.Tensor:
            count = tile.end - tile.begin
            self.cache.write(layer, tile.blocks, tile.offsets, k[:count], v[:count])
            mixed = q.new_zeros(len(q), a.num_heads * a.head_dim)
            for piece in tile.pieces:
                some = q[piece.begin : piece.end]
                mixed[piece.begin : piece.end] = attend_blocks(self.cache, layer, a, some, piece, self._tiles)
            return mixed

        hidden = decoder.hidden(self._ids(tokens), tile.positions, attend)
        index = batch.samples.token_index
        first, last = (int(x) for x in np.searchsorted(index, (tile.begin, tile.end)))
        for begin in range(first, last, self._tiles.rows):
            places = index[begin : min(begin + self._tiles.rows, last)] - tile.begin
            self._sample(decoder, hidden[self._ids(places)], batch, begin, result)

    def _sample(
        self, decoder: Decoder, hidden: torch.Tensor, batch: Batch, first: int, result: StepResult
    ) -> None:
        """Samples from `first` on, one for each row of `hidden`."""
        if batch.masks is not None:
            batch.masks.wait()
        padded = functional.pad(hidden, (0, 0, 0, self._tiles.rows - len(hidden)))
        logits = decoder.logits(padded)[: len(hidden)].cpu().numpy()
        for i, row in enumerate(logits):
            sample_row(row, batch, first + i, result)
