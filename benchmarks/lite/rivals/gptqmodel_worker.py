"""GPTQModel: see job.py."""

from __future__ import annotations

import os

from job import Job, answer, samples_of


def quantise(job: Job) -> None:
    import torch
    from gptqmodel import GPTQModel
    from gptqmodel.quantization.config import AWQConfig, GPTQConfig

    sizes = {"bits": job["bits"], "group_size": job["group"], "sym": job["symmetric"], "device": "cpu"}
    if job["method"] == "awq":
        config = AWQConfig(**sizes)
    else:
        config = GPTQConfig(**sizes, desc_act=job["method"] == "gptq act-order")
    model = GPTQModel.load(job["model"], config, dtype=torch.float32)
    model.quantize(
        [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in samples_of(job)], batch_size=1
    )
    model.save(job["out"])


def read(job: Job) -> None:
    """Each matrix multiplies the unit vectors: exact, whichever of its kernels the package takes."""
    import torch
    from gptqmodel import BACKEND, GPTQModel
    from gptqmodel.nn_modules.qlinear import BaseQuantLinear
    from safetensors.torch import save_file

    model = GPTQModel.load(job["model"], device="cpu", backend=BACKEND.TORCH, dtype=torch.float16)
    found = {}
    with torch.inference_mode():
        for name, module in model.model.named_modules():
            if isinstance(module, BaseQuantLinear):
                unit = torch.eye(module.in_features, dtype=torch.float16)
                found[name] = module(unit).float().T.contiguous()
    save_file(found, job["out"])


if __name__ == "__main__":
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # its default for two cores is one, which it refuses
    answer("gptqmodel", lambda job: read(job) if job["method"] == "read" else quantise(job))
