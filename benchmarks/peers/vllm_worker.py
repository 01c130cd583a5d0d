"""vLLM's CPU build, the engine in this process.  usage: vllm_worker.py MODEL_DIR THREADS"""

from __future__ import annotations

import os
import sys
from typing import Any

from protocol import Measure, Prompts, Tick, serve, timed

SETTINGS = {
    "OMP_NUM_THREADS": sys.argv[2] if len(sys.argv) > 2 else "2",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
}


def load() -> tuple[Measure, dict[str, Any]]:
    os.environ.update(SETTINGS)
    import vllm

    engine = vllm.LLM(
        sys.argv[1],
        dtype="bfloat16",
        max_model_len=2304,
        max_num_seqs=32,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    ).llm_engine
    names = iter(range(1 << 60))

    def generate(prompts: Prompts, new: int, tick: Tick) -> None:
        params = vllm.SamplingParams(
            temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False
        )
        index, seen = {}, {}
        for i, prompt in enumerate(prompts):
            name = str(next(names))
            index[name], seen[name] = i, 0
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            advanced = []
            for output in engine.step():
                key = next(name for name in index if output.request_id.startswith(name))
                count = len(output.outputs[0].token_ids)
                advanced += [index[key]] * (count - seen[key])
                seen[key] = count
            tick(advanced)

    generate([[1, 2, 3]], 2, lambda advanced: None)
    return timed(generate, 40_000), {"version": vllm.__version__}


if __name__ == "__main__":
    serve(load)
