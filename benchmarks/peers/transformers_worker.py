"""Hugging Face transformers' generate() in bfloat16.  usage: transformers_worker.py MODEL_DIR THREADS"""

from __future__ import annotations

import os
import sys
from typing import Any

from protocol import Measure, Prompts, Tick, serve, timed


def load() -> tuple[Measure, dict[str, Any]]:
    os.environ["OMP_NUM_THREADS"] = sys.argv[2]
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    torch.set_num_threads(int(sys.argv[2]))
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()
    model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def generate(prompts: Prompts, new: int, tick: Tick) -> None:
        everyone = range(len(prompts))

        class Told(transformers.StoppingCriteria):  # type: ignore[misc]
            def __call__(self, ids: Any, scores: Any, **rest: Any) -> Any:
                tick(everyone)
                return torch.zeros(len(prompts), dtype=torch.bool)

        ids = torch.tensor(prompts)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new,
            min_new_tokens=new,
            stopping_criteria=transformers.StoppingCriteriaList([Told()]),
        )

    generate([[1, 2, 3]], 2, lambda advanced: None)
    version = f"{transformers.__version__}, torch {torch.__version__}"
    return timed(generate, model.config.vocab_size), {"version": version}


if __name__ == "__main__":
    serve(load)
