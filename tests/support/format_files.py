"""Quantised model files, packed here by independent code from the public layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

# Where the fp16 factors of a block lie.
_FACTORS = {
    **{Kind.Q4_0: (0,), Kind.Q5_0: (0,), Kind.Q8_0: (0,), Kind.Q4_1: (0, 2), Kind.Q5_1: (0, 2)},
    **{Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)},
}
# What makes the values of a block about 1 in size.
_SIZE = {Kind.Q4_0: 8, Kind.Q5_0: 16, Kind.Q8_0: 128, Kind.Q4_1: 15, Kind.Q5_1: 31}
_SIZE |= {Kind.Q4_K: 15 * 32, Kind.Q5_K: 31 * 32, Kind.Q6_K: 32 * 64}


def gguf_blocks(
    kind: Kind, rows: int, columns: int, seed: int = 0, size: float = 1.0
) -> np.ndarray[Any, Any]:
    """Random bytes as rows of blocks, uint8 [rows, bytes]; factors such that values are about `size`."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, columns // block, block_bytes)).astype(np.uint8)
    for number, at in enumerate(_FACTORS[kind]):
        # A minimum of its own sign in the simple kinds; subtracted in the K kinds.
        least = -0.5 * _SIZE[kind] if kind in (Kind.Q4_1, Kind.Q5_1) else 15
        factor = size / _SIZE[kind] * (least if number else 1) * rng.uniform(0.5, 1, blocks.shape[:2])
        blocks[..., at : at + 2] = factor.astype("<f2")[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 256, 8, 4, 32, 512, 96


def gguf_shapes() -> dict[str, tuple[int, ...]]:
    """Tensors of a one-layer Llama whose rows are whole super-blocks."""
    kv, p = KV_HEADS * HEAD_DIM, "blk.0."
    matrices = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN)}
    matrices |= {"attn_output": (HIDDEN, HIDDEN), "ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN)}
    matrices |= {"ffn_down": (HIDDEN, FFN)}
    named: dict[str, tuple[int, ...]] = {f"{p}{name}.weight": shape for name, shape in matrices.items()}
    named |= {f"{p}attn_norm.weight": (HIDDEN,), f"{p}ffn_norm.weight": (HIDDEN,)}
    return named | {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}


def write_gguf(path: Path, kinds: dict[str, Kind], default: Kind, parts: int = 1) -> Path:
    """A one-layer Llama of random blocks; `kinds` gives the kind of tensors whose name holds its key."""
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in {
        "block_count": 1,
        "context_length": 256,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_uint16("split.count", parts)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    rng = np.random.default_rng(7)
    for seed, (name, shape) in enumerate(gguf_shapes().items()):
        if len(shape) == 1:
            writer.add_tensor(name, rng.uniform(0.5, 1.5, shape).astype(np.float32))
            continue
        kind = next((kind for part, kind in kinds.items() if part in name), default)
        blocks = gguf_blocks(kind, *shape, seed=seed, size=2.0 * shape[1] ** -0.5)
        writer.add_tensor(name, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
