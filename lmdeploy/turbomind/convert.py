"""A model's weights packed without the means to run it: for writing them to a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmdeploy.engine.executor import Limits
from lmdeploy.turbomind.cpus import choose_cpus
from lmdeploy.turbomind.executor import NativeConfig, native_limits, native_shape
from lmdeploy.turbomind.layout import ModelLayout
from lmdeploy.turbomind.weights import load_weights

if TYPE_CHECKING:
    from lmdeploy.models.checkpoint import Checkpoint
    from lmdeploy.turbomind._turbomind import Model


def pack(checkpoint: Checkpoint, layout: ModelLayout, threads: int) -> Model:
    """Read and pack every tensor, with room for one token only beside the weights."""
    from lmdeploy.turbomind._turbomind import Model

    limits = Limits(max_rows=1, max_step_tokens=1, max_context=16, block_size=16, num_threads=threads)
    config = NativeConfig(limits, num_blocks=1)
    shape = native_shape(checkpoint.spec.for_length(16), layout)
    model = Model(shape, native_limits(config), choose_cpus(threads), layout.nbytes)
    load_weights(model, checkpoint, layout)
    return model
