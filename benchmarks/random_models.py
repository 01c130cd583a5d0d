"""Models of public shapes with random weights, for benchmarks: speed does not depend on the values.

    python benchmarks/random_models.py OUT_DIR                                  lists shapes and formats
    python benchmarks/random_models.py OUT_DIR --shape 1b --format bf16 awq q4_0

Each becomes OUT_DIR/SHAPE-FORMAT: a Hugging Face directory (bf16, awq) or a directory with one GGUF file
(q4_0, q4_k_m, with the kinds llama.cpp's quantizer gives each tensor). Tensors are written one after the
other, so that the largest shape needs little memory. A shape and format give the same bytes everywhere.
What is there already is kept; a directory appears complete or not at all. GGUF needs the package `gguf`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from random_vocabulary import CHATML, Vocabulary, make_vocabulary, write_tokenizer

Bytes = npt.NDArray[np.uint8]
Tensor = tuple[str, tuple[int, ...]]
_AT_ONCE = 64 << 20  # bytes made and written together
_SHARD = 2 << 30  # bytes of a safetensors file
_AWQ_GROUP = 128


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder-only transformer; the first `ids` of its vocabulary stand for text."""

    architecture: str  # of config.json
    gguf_architecture: str
    split_rule: str  # as GGUF files call it
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    ids: int
    tied: bool
    bias: bool  # on queries, keys and values
    theta: float
    eps: float
    context: int

    def linears(self) -> Iterator[tuple[str, str, int, int]]:
        """(Hugging Face name, GGUF name, outputs, inputs) of one layer."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "self_attn.q_proj", "attn_q", q, self.hidden
        yield "self_attn.k_proj", "attn_k", kv, self.hidden
        yield "self_attn.v_proj", "attn_v", kv, self.hidden
        yield "self_attn.o_proj", "attn_output", self.hidden, q
        yield "mlp.gate_proj", "ffn_gate", self.intermediate, self.hidden
        yield "mlp.up_proj", "ffn_up", self.intermediate, self.hidden
        yield "mlp.down_proj", "ffn_down", self.hidden, self.intermediate

    @property
    def linear_parameters(self) -> int:
        """Weights of all layers' matrices: what is counted of a prefill."""
        return self.layers * sum(n * k for _, _, n, k in self.linears())


_LLAMA = ("LlamaForCausalLM", "llama", "llama-bpe")
SHAPES = {
    "0.5b": Shape(
        *("Qwen2ForCausalLM", "qwen2", "qwen2"),
        *(896, 4864, 24, 14, 2, 64, 151_936, 151_643),
        *(True, True, 1e6, 1e-6, 32_768),
    ),
    "1b": Shape(*_LLAMA, *(2048, 8192, 16, 32, 8, 64, 128_256, 128_000), *(True, False, 5e5, 1e-5, 131_072)),
    "8b": Shape(
        *_LLAMA, *(4096, 14_336, 32, 32, 8, 128, 128_256, 128_000), *(False, False, 5e5, 1e-5, 131_072)
    ),
}
FORMATS = ("bf16", "awq", "q4_0", "q4_k_m")

# Random bytes of a value: sign and mantissa as drawn, one of four exponents (2^-8 .. 2^-5; rms 0.028).
_BF16, _FP16 = (7, 119), (10, 7)  # bits of the mantissa, lowest biased exponent


def random_bytes(name: str, count: int) -> Iterator[Bytes]:
    """`count` bytes in pieces, the same for the same name."""
    random = np.random.Generator(np.random.SFC64(zlib.crc32(name.encode())))
    for begin in range(0, count, _AT_ONCE):
        size = min(_AT_ONCE, count - begin)
        words = random.integers(0, 1 << 64, -(-size // 8), np.uint64)
        yield words.view(np.uint8)[:size]


def floats(name: str, count: int, form: tuple[int, int]) -> Iterator[Bytes]:
    """16-bit values."""
    mantissa, lowest = form
    kept = np.uint16(0x8000 | (1 << mantissa) - 1)
    for piece in random_bytes(name, 2 * count):
        bits = piece.view(np.uint16)
        exponents = (bits >> np.uint16(mantissa) & np.uint16(3)) + np.uint16(lowest)
        yield ((bits & kept) | exponents << np.uint16(mantissa)).view(np.uint8)


def ones(count: int, form: tuple[int, int]) -> Iterator[Bytes]:
    bits = 0x3F80 if form == _BF16 else 0x3C00
    yield np.full(count, bits, np.uint16).view(np.uint8)


# Hugging Face directories


Part = tuple[str, str, tuple[int, ...], Iterator[Bytes]]  # name, safetensors type, shape, contents


def hf_parts(shape: Shape, awq: bool) -> Iterator[Part]:
    form, kind = (_FP16, "F16") if awq else (_BF16, "BF16")

    def dense(name: str, *extents: int) -> Part:
        count = int(np.prod(extents))
        return name, kind, extents, floats(name, count, form)

    def norm(name: str) -> Part:
        return name, kind, (shape.hidden,), ones(shape.hidden, form)

    yield dense("model.embed_tokens.weight", shape.vocab, shape.hidden)
    for i in range(shape.layers):
        prefix = f"model.layers.{i}."
        for hf, _, n, k in shape.linears():
            if awq:
                yield from _awq_parts(prefix + hf, n, k)
            else:
                yield dense(f"{prefix}{hf}.weight", n, k)
            if shape.bias and hf[-6:] in ("q_proj", "k_proj", "v_proj"):
                yield dense(f"{prefix}{hf}.bias", n)
        yield norm(prefix + "input_layernorm.weight")
        yield norm(prefix + "post_attention_layernorm.weight")
    yield norm("model.norm.weight")
    if not shape.tied:
        yield dense("lm_head.weight", shape.vocab, shape.hidden)


def _awq_parts(name: str, n: int, k: int) -> Iterator[Part]:
    """Codes 0..15, zeros 7 or 8, scales that give an rms of 0.028."""
    codes = random_bytes(name + ".qweight", k * n // 2)
    zeros = ((piece & 0x11) + 0x77 for piece in random_bytes(name + ".qzeros", k // _AWQ_GROUP * n // 2))
    scales = (_scales(piece, 0.006) for piece in random_bytes(name + ".scales", k // _AWQ_GROUP * n * 2))
    yield name + ".qweight", "I32", (k, n // 8), codes
    yield name + ".qzeros", "I32", (k // _AWQ_GROUP, n // 8), zeros
    yield name + ".scales", "F16", (k // _AWQ_GROUP, n), scales


def _scales(raw: Bytes, middle: float) -> Bytes:
    """float16 within a quarter of `middle`."""
    share = raw.view(np.uint16).astype(np.float32) / 65536 * 0.5 + 0.75
    return (share * middle).astype(np.float16).view(np.uint8)


def write_hf(shape: Shape, directory: Path, awq: bool) -> None:
    config: dict[str, Any] = {
        "architectures": [shape.architecture],
        "model_type": shape.gguf_architecture,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": shape.tied,
        "bos_token_id": shape.ids,
        "eos_token_id": shape.ids + 2,
        "torch_dtype": "float16" if awq else "bfloat16",
    }
    if awq:
        config["quantization_config"] = {
            "quant_method": "awq",
            "version": "gemm",
            "bits": 4,
            "group_size": _AWQ_GROUP,
            "zero_point": True,
        }
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    (directory / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [shape.ids, shape.ids + 2]})
    )
    write_tokenizer(make_vocabulary(shape.ids, shape.vocab), shape.split_rule, directory)
    _write_shards(hf_parts(shape, awq), directory)


def _write_shards(parts: Iterator[Part], directory: Path) -> None:
    """Safetensors files of at most about 2 GiB, each written front to back, and their index."""
    shards: list[list[Part]] = [[]]
    room = _SHARD
    for part in parts:
        if shards[-1] and room < _nbytes(part):
            shards.append([])
            room = _SHARD
        shards[-1].append(part)
        room -= _nbytes(part)
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        where = {part[0]: name for name, shard in zip(names, shards, strict=True) for part in shard}
        total = sum(_nbytes(part) for shard in shards for part in shard)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, shard in zip(names, shards, strict=True):
        _write_safetensors(shard, directory / name)


def _nbytes(part: Part) -> int:
    return int(np.prod(part[2])) * (4 if part[1] == "I32" else 2)


def _write_safetensors(parts: list[Part], path: Path) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for part in parts:
        header[part[0]] = {"dtype": part[1], "shape": part[2], "data_offsets": [at, at + _nbytes(part)]}
        at += _nbytes(part)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for part in parts:
            for piece in part[3]:
                file.write(piece.tobytes())


# GGUF files

# Kind: values and bytes of a block, then (offset, size of the value) of each float16 in it.
_BLOCKS: dict[str, tuple[int, int, tuple[tuple[int, float], ...]]] = {
    "Q4_0": (32, 18, ((0, 0.006),)),
    "Q5_0": (32, 22, ((0, 0.003),)),
    "Q8_0": (32, 34, ((0, 0.00037),)),
    "Q4_K": (256, 144, ((0, 0.000166), (2, 0.00124))),
    "Q6_K": (256, 210, ((208, 0.00002),)),
}
_BITS = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}  # instead, when a row is no whole number of blocks


def gguf_kind(mixed: bool, name: str, layer: int, shape: Shape, inputs: int) -> str:
    """The kind llama.cpp's quantizer takes for Q4_K_M (mixed) or Q4_0."""
    more = layer < shape.layers // 8 or layer >= 7 * shape.layers // 8 or (layer - shape.layers // 8) % 3 == 2
    head = name == "output" or (name == "token_embd" and shape.tied)
    if head or (mixed and more and name in ("attn_v", "ffn_down")):
        kind = "Q6_K"
    else:
        kind = "Q4_K" if mixed else "Q4_0"
    return _BITS.get(kind, kind) if inputs % _BLOCKS[kind][0] else kind


def blocks(name: str, count: int, kind: str) -> Iterator[Bytes]:
    _, size, scales = _BLOCKS[kind]
    per_piece = _AT_ONCE // size // 8 * 8
    for begin in range(0, count, per_piece):
        some = min(per_piece, count - begin)
        raw = next(random_bytes(f"{name} {begin}", some * size)).reshape(some, size)
        for offset, middle in scales:
            field = np.ascontiguousarray(raw[:, offset : offset + 2]).reshape(-1)
            raw[:, offset : offset + 2] = _scales(field, middle).reshape(some, 2)
        yield raw


def write_gguf(shape: Shape, directory: Path, mixed: bool, label: str) -> None:
    import gguf

    writer = gguf.GGUFWriter(directory / f"{label}.gguf", shape.gguf_architecture)
    writer.add_name(f"random {label}")
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.theta)
    writer.add_layer_norm_rms_eps(shape.eps)
    writer.add_vocab_size(shape.vocab)
    writer.add_file_type(15 if mixed else 2)
    writer.add_quantization_version(2)
    _add_vocabulary(writer, shape, make_vocabulary(shape.ids, shape.vocab))
    contents = list(_gguf_tensors(writer, shape, mixed))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for pieces in contents:
        # The writer takes a tensor whole and pads it; the largest is a third of a gigabyte.
        writer.write_tensor_data(np.concatenate([piece.reshape(-1) for piece in pieces]))
    writer.close()


def _add_vocabulary(writer: Any, shape: Shape, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(shape.split_rule)
    writer.add_token_list([*vocabulary.texts, *vocabulary.control])
    writer.add_token_types([1] * len(vocabulary.texts) + [3] * len(vocabulary.control))
    writer.add_token_merges([f"{left} {right}" for left, right in vocabulary.merges])
    writer.add_bos_token_id(shape.ids)
    writer.add_eos_token_id(shape.ids + 2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)


def _gguf_tensors(writer: Any, shape: Shape, mixed: bool) -> Iterator[Iterator[Bytes]]:
    """Announces every tensor; yields their contents in that order."""
    import gguf

    def matrix(name: str, layer: int, n: int, k: int) -> Iterator[Bytes]:
        full = name if layer < 0 else f"blk.{layer}.{name}"
        kind = gguf_kind(mixed, name, layer, shape, k)
        values, size, _ = _BLOCKS[kind]
        count = n * k // values
        code = getattr(gguf.GGMLQuantizationType, kind)
        writer.add_tensor_info(
            f"{full}.weight", (n, k // values * size), np.dtype(np.uint8), count * size, code
        )
        return blocks(full, count, kind)

    def vector(name: str, count: int, value: float) -> Iterator[Bytes]:
        writer.add_tensor_info(name, (count,), np.dtype(np.float32), 4 * count)
        return iter([np.full(count, value, np.float32).view(np.uint8)])

    yield matrix("token_embd", -1, shape.vocab, shape.hidden)
    for i in range(shape.layers):
        for _, name, n, k in shape.linears():
            yield matrix(name, i, n, k)
            if shape.bias and name in ("attn_q", "attn_k", "attn_v"):
                yield vector(f"blk.{i}.{name}.bias", n, 0.02)
        yield vector(f"blk.{i}.attn_norm.weight", shape.hidden, 1.0)
        yield vector(f"blk.{i}.ffn_norm.weight", shape.hidden, 1.0)
    yield vector("output_norm.weight", shape.hidden, 1.0)
    if not shape.tied:
        yield matrix("output", -1, shape.vocab, shape.hidden)


def make(out: Path, name: str, form: str) -> Path:
    """The model's path: a directory, also for GGUF. Written unless it is there."""
    if name == "8b" and form == "bf16":
        raise SystemExit("8b in bf16 takes 16 GB and is not used; take awq, q4_0 or q4_k_m")
    path = out / f"{name}-{form}"
    if path.exists():
        return path
    partial = out / f"{path.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if form in ("bf16", "awq"):
        write_hf(SHAPES[name], partial, form == "awq")
    else:
        write_gguf(SHAPES[name], partial, form == "q4_k_m", path.name)
    partial.rename(path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", nargs="*", choices=SHAPES, default=[])
    parser.add_argument("--format", nargs="*", choices=FORMATS, default=[])
    args = parser.parse_args()
    if not args.shape or not args.format:
        print(f"shapes: {', '.join(SHAPES)}; formats: {', '.join(FORMATS)}")
    for name in args.shape:
        for form in args.format:
            print(make(args.out, name, form))


if __name__ == "__main__":
    main()
