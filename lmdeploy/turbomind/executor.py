"""The native executor: a `Batch` in, one call into C++, a `StepResult` out.

Owns the loaded model. Decides nothing: limits, threads and the number of blocks are given to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lmdeploy.engine.batch import Batch, SampleColumns, StepResult
from lmdeploy.engine.executor import Capabilities, Limits
from lmdeploy.errors import EngineError
from lmdeploy.models.rope import inverse_frequencies
from lmdeploy.models.spec import LayerSpec, ModelSpec
from lmdeploy.turbomind.accuracy import Accuracy
from lmdeploy.turbomind.cpus import choose_cpus
from lmdeploy.turbomind.layout import ACTIVATIONS, InputLayout, LayerLayout, ModelLayout, model_layout
from lmdeploy.turbomind.packed import read_weights
from lmdeploy.turbomind.plan import rope_kinds
from lmdeploy.turbomind.weights import load_weights

if TYPE_CHECKING:
    from lmdeploy.models.checkpoint import Checkpoint
    from lmdeploy.turbomind import _turbomind as native

MAX_LOGPROBS = 1024


@dataclass(frozen=True, slots=True)
class NativeConfig:
    """Everything that is not the model's: limits of a step, blocks of the cache, how numbers are held."""

    limits: Limits
    num_blocks: int
    accuracy: Accuracy = "exact"
    dtype: str = "auto"  # of unquantised matrices


@dataclass(frozen=True, slots=True)
class OpTime:
    """One operation over a whole step."""

    seconds: float  # mean over threads
    times: int  # how often a thread came to its end; of "barrier": how many there are


class TurbomindExecutor:
    """Implements `engine.executor.Executor` on the CPU. ModelError when the model cannot be computed."""

    def __init__(self, config: NativeConfig, spec: ModelSpec, checkpoint: Checkpoint) -> None:
        from lmdeploy.turbomind._turbomind import Model

        headers = {name: checkpoint.info(name) for name in checkpoint.names()}
        layout = model_layout(spec, headers, config.accuracy, config.dtype)
        cpus = choose_cpus(config.limits.num_threads)
        shape, limits = native_shape(spec, layout), native_limits(config)
        self._model: native.Model | None = Model(shape, limits, cpus, layout.nbytes)
        self._config, self._vocab_size = config, spec.vocab_size
        if checkpoint.packed is None:
            load_weights(self._model, checkpoint, layout)
        else:
            read_weights(self._model, Path(checkpoint.source), checkpoint.packed, layout)

    def capabilities(self) -> Capabilities:
        """What the engine must know."""
        limits = self._config.limits
        return Capabilities(
            block_size=limits.block_size,
            num_blocks=self._config.num_blocks,
            max_step_tokens=limits.max_step_tokens,
            max_rows=limits.max_rows,
            vocab_size=self._vocab_size,
            max_logprobs=min(MAX_LOGPROBS, self._vocab_size),
        )

    def execute(self, batch: Batch) -> StepResult:
        """Compute one step. EngineError when the batch is not within the model's and the cache's limits."""
        if self._model is None:
            raise EngineError("the executor is closed")
        s = batch.samples
        count = len(s.token_index)
        top = max(int(s.logprobs.max(initial=0)), 0)
        result = StepResult(
            token_ids=np.empty(count, np.int32),
            finite=np.empty(count, np.bool_),
            logprob=np.empty(count, np.float32),
            top_ids=np.empty((count, top), np.int32),
            top_logprobs=np.empty((count, top), np.float32),
            logits={int(i): np.empty(self._vocab_size, np.float32) for i in np.flatnonzero(s.want_logits)},
        )
        rows = (batch.token_ids, batch.row_start, batch.context_len, batch.block_start, batch.block_ids)
        written = (result.token_ids, result.finite, result.logprob, result.top_ids, result.top_logprobs)
        try:
            masks = batch.masks
            more = () if masks is None else ((masks.index, masks.bits, masks.wait),)
            self._model.step(rows, _columns(s), written, result.logits, *more)
        except (ValueError, IndexError, RuntimeError) as error:
            raise EngineError(f"the batch cannot be computed: {error}") from error
        return result

    def set_profile(self, on: bool) -> None:
        """Whether steps measure their operations, which costs nothing while off."""
        if self._model is not None:
            self._model.set_profile(on)

    def profile(self) -> dict[str, OpTime]:
        """Where the time of the last step went; empty while off. The seconds of all operations add up to the
        time inside the step, since "barrier" is waiting for other threads."""
        threads = [] if self._model is None else self._model.profile()
        return {
            entries[0][0]: OpTime(sum(e[1] for e in entries) / len(threads), max(e[2] for e in entries))
            for entries in zip(*threads, strict=True)
        }

    def close(self) -> None:
        """Free weights and cache."""
        self._model = None


def native_limits(config: NativeConfig) -> native.Limits:
    """`config` as the extension takes it."""
    from lmdeploy.turbomind import _turbomind as native

    given, limits = config.limits, native.Limits()
    limits.max_rows, limits.max_step_tokens = given.max_rows, given.max_step_tokens
    limits.max_context, limits.block_size = given.max_context, given.block_size
    limits.num_blocks, limits.threads = config.num_blocks, given.num_threads
    limits.kv_bits = given.kv_bits
    return limits


def native_shape(spec: ModelSpec, layout: ModelLayout) -> native.ModelShape:
    """The model's mathematics as the extension takes it."""
    from lmdeploy.turbomind import _turbomind as native

    shape = native.ModelShape()
    shape.hidden, shape.vocab = spec.hidden_size, spec.vocab_size
    shape.norm_eps, shape.norm_offset = spec.norm.eps, spec.norm.offset
    shape.embedding_scale, shape.logit_scale = spec.embedding_scale, spec.logit_scale
    shape.logit_softcap = spec.logit_softcap or 0.0
    shape.head_input = _input(layout.head_input)
    ropes = rope_kinds(spec)
    shape.rope = [inverse_frequencies(rope).tolist() for rope in ropes]
    shape.rope_scale = [rope.attention_factor for rope in ropes]
    pairs = zip(spec.layers, layout.layers, strict=True)
    shape.layers = [
        _layer(x, y, -1 if x.attention.rope is None else ropes.index(x.attention.rope)) for x, y in pairs
    ]
    return shape


def _layer(spec: LayerSpec, layout: LayerLayout, rope: int) -> native.LayerShape:
    from lmdeploy.turbomind import _turbomind as native

    a, layer = spec.attention, native.LayerShape()
    layer.heads, layer.kv_heads, layer.head_dim = a.num_heads, a.num_kv_heads, a.head_dim
    layer.rope, layer.rotary_dim = rope, a.rope.rotary_dim if a.rope else 0
    layer.window, layer.softcap = a.window or 0, a.softcap or 0.0
    layer.scale, layer.qk_norm, layer.qk_norm_across = a.scale, a.qk_norm, a.qk_norm_across_heads
    layer.pre_norm, layer.post_norm = spec.pre_norm, spec.post_norm
    layer.residual_scale = spec.residual_scale
    layer.intermediate = spec.ffn.intermediate_size
    layer.activation = ACTIVATIONS.index(spec.ffn.activation)
    layer.qkv_input, layer.o_input = _input(layout.qkv.input), _input(layout.o.input)
    layer.gate_up_input, layer.down_input = _input(layout.gate_up.input), _input(layout.down.input)
    return layer


def _input(layout: InputLayout) -> native.InputFormat:
    from lmdeploy.turbomind import _turbomind as native

    return native.InputFormat(layout.k, layout.group, layout.bf16, layout.f32, layout.threshold)


def _columns(s: SampleColumns) -> tuple[object, ...]:
    """In the order that csrc/bindings/model.cpp reads them."""
    return (
        s.token_index,
        s.target_ids,
        s.temperature,
        s.top_k,
        s.top_p,
        s.min_p,
        s.repetition_penalty,
        s.presence_penalty,
        s.frequency_penalty,
        s.seed,
        s.position,
        s.logprobs,
        s.bias_start,
        s.bias_ids,
        s.bias_values,
        s.history_start,
        s.history_ids,
        s.history_counts,
    )
