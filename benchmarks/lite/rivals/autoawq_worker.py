"""AutoAWQ: see job.py."""

from __future__ import annotations

from job import Job, answer, samples_of


def quantise(job: Job) -> None:
    import torch
    from awq import AutoAWQForCausalLM

    samples = samples_of(job)
    model = AutoAWQForCausalLM.from_pretrained(job["model"], torch_dtype=torch.float32, device_map="cpu")
    config = {
        "zero_point": not job["symmetric"],
        "q_group_size": job["group"],
        "w_bit": job["bits"],
        "version": "GEMM",
    }
    most = {"max_calib_samples": len(samples), "max_calib_seq_len": max(map(len, samples))}
    model.quantize(None, quant_config=config, calib_data=samples, n_parallel_calib_samples=16, **most)
    model.save_quantized(job["out"])


def read(job: Job) -> None:
    import torch
    from awq import AutoAWQForCausalLM
    from awq.modules.linear import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm
    from safetensors.torch import save_file

    model = AutoAWQForCausalLM.from_quantized(job["model"], fuse_layers=False, device_map="cpu")
    found = {}
    for name, module in model.model.named_modules():
        if isinstance(module, WQLinear_GEMM):
            parts = module.qweight, module.qzeros, module.scales.to(torch.float32)
            found[name] = dequantize_gemm(*parts, module.w_bit, module.group_size).T.contiguous()
    save_file(found, job["out"])


if __name__ == "__main__":
    answer("autoawq", lambda job: read(job) if job["method"] == "read" else quantise(job))
