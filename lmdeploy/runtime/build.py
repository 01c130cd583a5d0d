"""`RuntimeConfig` -> a running `Engine`. Decides nothing: every number was settled by `resolve`."""

from __future__ import annotations

import time

from lmdeploy.engine.draft_model import DraftModel
from lmdeploy.engine.draft_policy import AdaptivePolicy
from lmdeploy.engine.executor import Executor
from lmdeploy.engine.guided import Guides
from lmdeploy.engine.loop import Engine
from lmdeploy.engine.prompt_lookup import PromptLookup
from lmdeploy.engine.scheduler import EngineOptions
from lmdeploy.engine.speculation import Proposer, Speculation
from lmdeploy.errors import CapacityError
from lmdeploy.models.checkpoint import Checkpoint
from lmdeploy.models.registry import open_checkpoint
from lmdeploy.runtime.grammars import LLGrammars
from lmdeploy.runtime.loading import Loading
from lmdeploy.runtime.memory_plan import size
from lmdeploy.runtime.resolve import RuntimeConfig
from lmdeploy.runtime.step_timing import measure_step_cost
from lmdeploy.text.tokenizer import load_tokenizer


def build_engine(config: RuntimeConfig) -> Engine:
    """Read the weights and take all memory of the plan. Raises ModelError and CapacityError."""
    # Made before the executor binds this thread to a processor: its own threads go where there is room.
    grammars = LLGrammars(lambda: load_tokenizer(config.model_path), config.vocab_size)
    try:
        with Loading(_taken_here(config)):
            executor = _executor(config, config.model_path, config.model_format)
            proposer = _proposer(config)
    except MemoryError:
        raise CapacityError(
            f"the system did not give the planned {size(config.plan.total)}: other programs took memory "
            "since the plan was made; free some, or lower cache_max_entry_count"
        ) from None
    # What one sequence's steps cost decides nothing where no other can wait beside it.
    alone = config.max_batch_size == 1 and proposer is None
    step_cost = None if alone else measure_step_cost(executor)
    options = EngineOptions(
        max_batch_size=config.max_batch_size,
        max_prefill_token_num=config.max_prefill_token_num,
        enable_prefix_caching=config.enable_prefix_caching,
        step_cost=step_cost,
        lanes=config.lanes,
        max_queue=config.max_queue,
        batching_window=config.batching_window,
    )
    guides = Guides(grammars, config.vocab_size)
    if config.speculative is None or proposer is None or step_cost is None:
        return Engine(executor, options, guides=guides)
    policy = AdaptivePolicy(proposer.num_kinds, config.speculative.most, step_cost)
    return Engine(executor, options, Speculation(proposer, policy, time.perf_counter), guides)


def _proposer(config: RuntimeConfig) -> Proposer | None:
    wanted = config.speculative
    if wanted is None:
        return None
    if wanted.model:
        return DraftModel(_executor(config, wanted.model), config.enable_prefix_caching, config.vocab_size)
    return PromptLookup(wanted.lookup_min, wanted.lookup_max)


def _taken_here(config: RuntimeConfig) -> int:
    """Bytes of this process's memory that the executor takes."""
    plan = config.plan
    return plan.weights + plan.workspace + plan.kv_pool + plan.draft if config.device == "cpu" else 0


def _executor(config: RuntimeConfig, model_path: str, model_format: str | None = None) -> Executor:
    checkpoint = open_checkpoint(model_path, model_format)
    try:
        return _loaded(config, checkpoint)
    finally:
        checkpoint.close()


def _loaded(config: RuntimeConfig, checkpoint: Checkpoint) -> Executor:
    """Imports one engine only: the base installation has no torch, and torch needs no extension."""
    spec = checkpoint.spec.for_length(config.session_len)
    if config.backend == "turbomind":
        from lmdeploy.turbomind.executor import NativeConfig, TurbomindExecutor

        native = NativeConfig(config.limits, config.plan.num_blocks, config.accuracy, config.dtype or "auto")
        return TurbomindExecutor(native, spec, checkpoint)
    from lmdeploy.pytorch.executor import TorchConfig, TorchExecutor

    torch = TorchConfig(config.limits, config.plan.num_blocks, config.device, config.dtype)
    return TorchExecutor(torch, spec, checkpoint)
