"""OpenVINO GenAI's continuous batching.  usage: openvino_genai_worker.py EXPORTED_DIR THREADS"""

from __future__ import annotations

import sys
from typing import Any

from protocol import Measure, Prompts, Tick, serve, timed


def load() -> tuple[Measure, dict[str, Any]]:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    path, threads = sys.argv[1], int(sys.argv[2])
    options = genai.SchedulerConfig()
    options.cache_size = 1  # GiB
    options.max_num_batched_tokens, options.max_num_seqs = 2048, 32
    options.enable_prefix_caching = False
    pipe = genai.ContinuousBatchingPipeline(path, options, "CPU", {"INFERENCE_NUM_THREADS": threads})
    names = iter(range(1 << 60))

    def generate(prompts: Prompts, new: int, tick: Tick) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new
        config.ignore_eos, config.do_sample = True, False
        handles = [
            pipe.add_request(next(names), ov.Tensor(np.array([prompt], np.int64)), config)
            for prompt in prompts
        ]
        while pipe.has_non_finished_requests():
            pipe.step()
            advanced = []
            for i, handle in enumerate(handles):
                if handle.can_read():
                    advanced += [i] * sum(len(x.generated_ids) for x in handle.read().values())
            tick(advanced)

    generate([[1, 2, 3]], 2, lambda advanced: None)
    return timed(generate, 40_000), {"version": genai.__version__}


if __name__ == "__main__":
    serve(load)
