"""llm-compressor and compressed-tensors: see job.py."""

from __future__ import annotations

from typing import Any

from job import Job, answer, samples_of


def modifiers(job: Job) -> list[Any]:
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.smoothquant import SmoothQuantModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    where: dict[str, Any] = {"targets": ["Linear"], "ignore": ["lm_head"]}
    if job["method"] == "smoothquant":
        return [SmoothQuantModifier(smoothing_strength=0.8), GPTQModifier(scheme="W8A8", **where)]
    weights = {
        "num_bits": job["bits"],
        "type": "int",
        "symmetric": job["symmetric"],
        "strategy": "group",
        "group_size": job["group"],
    }
    groups = {
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    rounding = GPTQModifier if job["method"] in ("gptq", "awq+gptq") else QuantizationModifier
    scales = [AWQModifier(duo_scaling="both")] if "awq" in job["method"] else []
    return [*scales, rounding(**groups)]


def quantise(job: Job) -> None:
    from datasets import Dataset
    from llmcompressor import oneshot
    from transformers import AutoModelForCausalLM

    samples = samples_of(job)
    rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in samples]
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype="float32")
    most = {"max_seq_length": max(map(len, samples)), "num_calibration_samples": len(samples)}
    oneshot(
        model=model,
        dataset=Dataset.from_list(rows),
        recipe=modifiers(job),
        shuffle_calibration_samples=False,
        **most,
    )
    model.save_pretrained(job["out"], save_compressed=True)


def read(job: Job) -> None:
    """compressed-tensors in transformers: each matrix, or what it makes of the unit vectors."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype="float32")
    found = {}
    with torch.inference_mode():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                if hasattr(module, "weight"):
                    values = module.weight
                else:
                    values = module(torch.eye(module.in_features)).T
                found[name] = values.detach().float().clone(memory_format=torch.contiguous_format)
    save_file(found, job["out"])


if __name__ == "__main__":
    answer("llmcompressor", lambda job: read(job) if job["method"] == "read" else quantise(job))
