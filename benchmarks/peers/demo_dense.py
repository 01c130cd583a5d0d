"""A GGUF file as a Hugging Face directory in bfloat16.  usage: demo_dense.py FILE.gguf OUT_DIR

Runs in an environment with torch, transformers, gguf and sentencepiece.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main() -> None:
    file, out = Path(sys.argv[1]), Path(sys.argv[2])
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.is_quantized, model.hf_quantizer = False, None  # it is not any more: save plain matrices
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    partial = out.with_name(out.name + ".partial")
    model.to(torch.bfloat16).save_pretrained(partial)
    AutoTokenizer.from_pretrained(**where).save_pretrained(partial)
    partial.rename(out)


if __name__ == "__main__":
    main()
