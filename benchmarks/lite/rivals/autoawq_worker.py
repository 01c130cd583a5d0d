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
    """Its models need a GPU or a package that is no longer made, so its unpacking is called by itself."""
    from pathlib import Path

    import torch
    from awq.models._config import AwqConfig
    from awq.utils.packing_utils import dequantize_gemm
    from safetensors.torch import load_file, save_file

    config = AwqConfig.from_pretrained(job["model"])
    tensors = {}
    for file in sorted(Path(job["model"]).glob("*.safetensors")):
        tensors.update(load_file(file))
    found = {}
    for name in [n.removesuffix(".qweight") for n in tensors if n.endswith(".qweight")]:
        weight, zeros, scales = (tensors[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales"))
        values = dequantize_gemm(weight, zeros, scales.to(torch.float32), config.w_bit, config.q_group_size)
        found[name] = values.T.contiguous()
    save_file(found, job["out"])


if __name__ == "__main__":
    answer("autoawq", lambda job: read(job) if job["method"] == "read" else quantise(job))
