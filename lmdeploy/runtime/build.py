"""`RuntimeConfig` -> a running `Engine`. Decides nothing: every number was settled by `resolve`."""

from __future__ import annotations

from lmdeploy.engine.loop import Engine
from lmdeploy.engine.scheduler import EngineOptions
from lmdeploy.errors import CapacityError
from lmdeploy.models.registry import open_checkpoint
from lmdeploy.runtime.memory_plan import size
from lmdeploy.runtime.resolve import RuntimeConfig
from lmdeploy.turbomind.executor import NativeConfig, TurbomindExecutor


def build_engine(config: RuntimeConfig) -> Engine:
    """Read the weights and take all memory of the plan. Raises ModelError and CapacityError."""
    native = NativeConfig(config.limits, config.plan.num_blocks)
    checkpoint = open_checkpoint(config.model_path, config.model_format)
    try:
        spec = checkpoint.spec.for_length(config.session_len)
        executor = TurbomindExecutor(native, spec, checkpoint)
    except MemoryError:
        raise CapacityError(
            f"the system did not give the planned {size(config.plan.total)}: other programs took memory "
            "since the plan was made; free some, or lower cache_max_entry_count"
        ) from None
    finally:
        checkpoint.close()
    options = EngineOptions(
        max_batch_size=config.max_batch_size,
        max_prefill_token_num=config.max_prefill_token_num,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    return Engine(executor, options)
